#include "rows.h"

#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

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

class Writer {
 public:
  template <typename T>
  void add(T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void add_shape(const std::vector<int64_t>& shape) {
    add(static_cast<int32_t>(shape.size()));
    for (const int64_t length : shape) add(length);
  }

  std::string bytes;
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

// Does not wait: of a row_sparse array that the running operation holds.
void* values_of(const MXNetApi& api, NDArrayHandle array) {
  void* values = nullptr;
  api.check(api.MXNDArrayGetData(array, &values));
  return values;
}

void gather(const char* source, uint64_t row_bytes, const std::vector<int64_t>& ids, char* destination) {
  for (size_t i = 0; i < ids.size(); ++i)
    std::memcpy(destination + i * row_bytes, source + static_cast<uint64_t>(ids[i]) * row_bytes, row_bytes);
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

NDArrayHandle make_rows(const MXNetApi& api, int dtype, const std::vector<int64_t>& shape, const int64_t* ids,
                        uint64_t count) {
  std::vector<int64_t> values_shape = shape;
  values_shape.at(0) = static_cast<int64_t>(count);
  Writer writer;
  writer.add(kMagic);
  writer.add(kRowSparse);
  writer.add_shape(values_shape);
  writer.add_shape(shape);
  writer.add(int32_t{1});  // cpu
  writer.add(int32_t{0});
  writer.add(int32_t{dtype});
  writer.add(kInt64);
  writer.add_shape({static_cast<int64_t>(count)});
  uint64_t bytes = size_of(static_cast<DType>(dtype));
  for (const int64_t length : values_shape) bytes *= static_cast<uint64_t>(length);
  writer.bytes.append(bytes, '\0');
  writer.bytes.append(reinterpret_cast<const char*>(ids), count * sizeof(int64_t));
  NDArrayHandle made = nullptr;
  api.check(api.MXNDArrayLoadFromRawBytes(writer.bytes.data(), writer.bytes.size(), &made));
  return made;
}

void MXNetRows::init(NDArrayHandle value, uint64_t round, Priority priority) {
  engine_->enqueue(worker_, key, priority, "first value", value, key.landing,
                   [worker = worker_, handle = key.handle, priority, lands = lands_, round,
                    changed = changed_](const MXNetEngine::Operation& operation) {
                     void* landing = lands ? operation.output_address() : nullptr;
                     const void* first = operation.input() ? operation.input_address() : landing;
                     worker->init(handle, first, landing, priority.in_queues,
                                  [done = operation.completion(), changed, round](const Error* error, bool) {
                                    changed->note_all(round);
                                    done(error);
                                  });
                   });
}

void MXNetRows::push(NDArrayHandle gradient, bool is_sparse, uint64_t round, const RoundScalars& scalars,
                     Priority priority) {
  engine_->enqueue(
      worker_, key, priority, "gradient", gradient, key.landing,
      [worker = worker_, api = &engine_->api(), handle = key.handle, priority, lands = lands_, rows = rows_, is_sparse,
       round, scalars, changed = changed_](const MXNetEngine::Operation& operation) {
        void* landing = lands ? operation.output_address() : nullptr;
        const auto push = [=](std::vector<int64_t> row_ids, const void* values,
                              MXNetEngine::Operation::Completion done) {
          const auto ids = std::make_shared<const std::vector<int64_t>>(std::move(row_ids));
          RowsView view;
          view.ids = ids->data();
          view.count = ids->size();
          view.values = values;
          worker->push_rows(handle, view, landing, priority.in_queues, scalars,
                            [done = std::move(done), ids, changed, round](const Error* error, const RowsView& now) {
                              if (!error) changed->note(round, now.ids, now.count);
                              done(error);
                            });
        };
        if (is_sparse) {
          std::vector<int64_t> ids = ids_of(*api, operation.input());
          const void* values = ids.empty() ? nullptr : values_of(*api, operation.input());
          push(std::move(ids), values, operation.completion());
        } else {
          operation.with_input(priority, [push, rows](const void* values, MXNetEngine::Operation::Completion done) {
            std::vector<int64_t> all(rows);
            std::iota(all.begin(), all.end(), int64_t{0});
            push(std::move(all), values, std::move(done));
          });
        }
      });
}

void MXNetRows::skip(uint64_t round, Priority priority, Worker::Done done) {
  void* landing = lands_ ? landing_address() : nullptr;
  worker_->skip(key.handle, landing, priority.in_queues,
                [kept = engine_->api().keep(key.landing), done = std::move(done), changed = changed_, round](
                    const Error* error, bool updated) {
                  changed->note_all(round);
                  done(error, updated);
                });
}

void* MXNetRows::landing_address() const {
  void* landing = engine_->api().address_of(key.landing);
  if (!landing)
    throw std::runtime_error("the landing array of key '" + key.name +
                             "' was moved into a blocked oneDNN layout; only P3 may write it");
  return landing;
}

void MXNetRows::copy_changed(NDArrayHandle weight, uint64_t from, uint64_t to, Priority priority) {
  engine_->enqueue(worker_, key, priority, "landing array", key.landing, weight,
                   [api = &engine_->api(), name = key.name, rows = rows_, row_bytes = row_bytes_, from, to,
                    changed = changed_](const MXNetEngine::Operation& operation) {
                     auto* destination = static_cast<char*>(api->address_of(operation.output()));
                     if (!destination)
                       throw Error(ErrorKind::kUsage,
                                   "the weight of key '" + name +
                                       "' is held in a blocked oneDNN layout, in which rows cannot be written; "
                                       "use the key with dense gradients");
                     const auto* landing = static_cast<const char*>(operation.input_address());
                     std::vector<int64_t> ids;
                     if (changed->between(from, to, &ids)) {
                       for (const int64_t id : ids)
                         std::memcpy(destination + static_cast<uint64_t>(id) * row_bytes,
                                     landing + static_cast<uint64_t>(id) * row_bytes, row_bytes);
                     } else {
                       std::memcpy(destination, landing, rows * row_bytes);
                     }
                     operation.completion()(nullptr);
                   });
}

void MXNetRows::fetch(std::vector<int64_t> ids, NDArrayHandle destination, Priority priority) {
  engine_->enqueue(
      worker_, key, priority, "last round", key.landing, destination,
      [worker = worker_, api = &engine_->api(), handle = key.handle, priority,
       ids = std::make_shared<const std::vector<int64_t>>(std::move(ids))](const MXNetEngine::Operation& operation) {
        worker->fetch_rows(handle, 0, ids->data(), ids->size(), values_of(*api, operation.output()), priority.in_queues,
                           [done = operation.completion(), ids](const Error* error, bool) { done(error); });
      });
}

void gather_rows(const MXNetEngine& engine, Worker* worker, const MXNetEngine::Key& key, uint64_t row_bytes,
                 std::vector<int64_t> ids, NDArrayHandle source, NDArrayHandle destination, Priority priority) {
  engine.enqueue(worker, key, priority, "value", source, destination,
                 [api = &engine.api(), row_bytes, ids = std::move(ids)](const MXNetEngine::Operation& operation) {
                   gather(static_cast<const char*>(operation.input_address()), row_bytes, ids,
                          static_cast<char*>(values_of(*api, operation.output())));
                   operation.completion()(nullptr);
                 });
}

}  // namespace p3
