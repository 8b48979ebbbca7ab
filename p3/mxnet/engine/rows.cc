#include "rows.h"

#include <cstring>
#include <numeric>
#include <stdexcept>

namespace p3 {

namespace {

// How MXNet serialises an NDArray: a head, the values, the ids. Numbers are little-endian.
constexpr uint32_t kMagic = 0xF993fac9;
constexpr int32_t kRowSparse = 1;
constexpr int32_t kInt64 = 6;

class Reader {
 public:
  Reader(const char* data, size_t size) : data_(data), left_(size) {}

  template <typename T>
  T next() {
    if (left_ < sizeof(T)) throw std::runtime_error("MXNet's row_sparse format is not that of MXNet 1.9.1");
    T value;
    std::memcpy(&value, data_, sizeof(T));
    data_ += sizeof(T);
    left_ -= sizeof(T);
    return value;
  }
  std::vector<int64_t> next_shape() {
    std::vector<int64_t> shape;
    for (int32_t dimensions = next<int32_t>(); dimensions > 0; --dimensions) shape.push_back(next<int64_t>());
    return shape;
  }
  size_t left() const { return left_; }

 private:
  const char* data_;
  size_t left_;
};

// The ids of a row_sparse array that is computed and that nobody writes any more; so MXNet does not wait here, as it
// would if it were asked for the array of the ids.
std::vector<int64_t> ids_of(const MXNetApi& api, NDArrayHandle array) {
  size_t size = 0;
  const char* bytes = nullptr;  // MXNet's, until this thread serialises the next array
  api.check(api.MXNDArraySaveRawBytes(array, &size, &bytes));
  Reader reader(bytes, size);
  const bool is_row_sparse = reader.next<uint32_t>() == kMagic && reader.next<int32_t>() == kRowSparse;
  if (!is_row_sparse) throw std::runtime_error("MXNet's row_sparse format is not that of MXNet 1.9.1");
  reader.next_shape();
  reader.next_shape();
  for (int field = 0; field < 3; ++field) reader.next<int32_t>();  // device and element type
  if (reader.next<int32_t>() != kInt64) throw std::runtime_error("row ids must be of type int64");
  const auto shape = reader.next_shape();
  std::vector<int64_t> ids(shape.size() == 1 && shape[0] > 0 ? static_cast<size_t>(shape[0]) : 0);
  const size_t id_bytes = ids.size() * sizeof(int64_t);
  if (reader.left() < id_bytes) throw std::runtime_error("MXNet's row_sparse format is not that of MXNet 1.9.1");
  if (id_bytes) std::memcpy(ids.data(), bytes + size - id_bytes, id_bytes);
  return ids;
}

}  // namespace

void ChangedRows::note(uint64_t round, const int64_t* ids, uint64_t count) {
  MutexLock lock(mutex_);
  rounds_.emplace_back(round, std::vector<int64_t>(ids, ids + count));
  noted_ += count;
  while (noted_ > rows_) {
    noted_ -= rounds_.front().second.size();
    forgotten_ = rounds_.front().first;
    rounds_.pop_front();
  }
}

void ChangedRows::note_all(uint64_t round) {
  MutexLock lock(mutex_);
  rounds_.clear();
  noted_ = 0;
  forgotten_ = round;
}

bool ChangedRows::between(uint64_t from, uint64_t to, std::vector<int64_t>* ids) const {
  MutexLock lock(mutex_);
  if (from < forgotten_) return false;
  for (const auto& [round, changed] : rounds_)
    if (round > from && round <= to) ids->insert(ids->end(), changed.begin(), changed.end());
  return true;
}

void MXNetRowsKey::init(NDArrayHandle value, Priority priority) {
  enqueue(priority, "first value", value, landing_, [this, priority, round = ++rounds_](const Operation& operation) {
    void* landing = landing_address(operation.output());
    const void* first = operation.input() ? operation.input_address() : landing;
    worker_.init(handle_, first, landing, priority.in_queues,
                 [this, round, done = operation.done()](const Error* error, bool updated) {
                   changed_.note_all(round);
                   done(error, updated);
                 });
  });
}

void MXNetRowsKey::push(NDArrayHandle gradient, const RoundSettings& settings, Priority priority) {
  enqueue(priority, "gradient", gradient, landing_,
          [this, settings, priority, round = ++rounds_](const Operation& operation) {
            const auto push = [this, settings, priority, round, landing = landing_address(operation.output())](
                                  std::vector<int64_t> row_ids, const void* values, Worker::Done done) {
              const auto ids = std::make_shared<const std::vector<int64_t>>(std::move(row_ids));
              worker_.push_rows(handle_, {ids->data(), ids->size(), values}, landing, priority.in_queues, settings,
                                [this, ids, round, done = std::move(done)](const Error* error, const RowsView& now) {
                                  if (!error) changed_.note(round, now.ids, now.count);
                                  done(error, true);
                                });
            };
            if (api_.is_dense(operation.input())) {
              operation.with_input([push, rows = rows_](const void* values, Worker::Done done) {
                std::vector<int64_t> all(rows);
                std::iota(all.begin(), all.end(), int64_t{0});
                push(std::move(all), values, std::move(done));
              });
            } else {
              std::vector<int64_t> ids = ids_of(api_, operation.input());
              const void* values = ids.empty() ? nullptr : api_.values_of(operation.input());
              push(std::move(ids), values, operation.done());
            }
          });
}

std::function<void()> MXNetRowsKey::note_skip() {
  return [this, key = shared_from_this(), round = ++rounds_] { changed_.note_all(round); };
}

void MXNetRowsKey::copy_changed(NDArrayHandle weight, uint64_t since, Priority priority) {
  enqueue(priority, "landing array", landing_, weight, [this, since, now = rounds_](const Operation& operation) {
    auto* destination = static_cast<char*>(api_.address_of(operation.output()));
    if (!destination)
      throw misuse("the weight of key '" + name_ +
                   "' is held in a blocked oneDNN layout, in which rows cannot be written; use the key with dense "
                   "gradients");
    const auto* landing = static_cast<const char*>(operation.input_address());
    std::vector<int64_t> ids;
    if (changed_.between(since, now, &ids)) {
      for (const int64_t id : ids) {
        const uint64_t offset = static_cast<uint64_t>(id) * row_bytes_;
        std::memcpy(destination + offset, landing + offset, row_bytes_);
      }
    } else {
      std::memcpy(destination, landing, rows_ * row_bytes_);
    }
    operation.done()(nullptr, true);
  });
}

void MXNetRowsKey::fetch(std::vector<int64_t> row_ids, NDArrayHandle destination, Priority priority) {
  const auto ids = std::make_shared<const std::vector<int64_t>>(std::move(row_ids));
  enqueue(priority, "last round", landing_, destination, [this, ids, priority](const Operation& operation) {
    worker_.fetch_rows(handle_, 0, ids->data(), ids->size(), api_.values_of(operation.output()), priority.in_queues,
                       [ids, done = operation.done()](const Error* error, bool updated) { done(error, updated); });
  });
}

void* MXNetRowsKey::landing_address(NDArrayHandle landing) const {
  return lands_ ? MXNetKey::landing_address(landing) : nullptr;
}

}  // namespace p3
