#include "worker/operation.h"

#include <cstring>
#include <numeric>
#include <utility>

#include "numeric/sorted_rows.h"
#include "worker/capture_transfer.h"
#include "worker/rows_transfer.h"
#include "worker/slice_transfer.h"

namespace p3 {
namespace {

using Kind = Transfer::Kind;

std::vector<int64_t> row_ids(uint64_t first, uint64_t count) {
  std::vector<int64_t> ids(count);
  std::iota(ids.begin(), ids.end(), static_cast<int64_t>(first));
  return ids;
}

}  // namespace

Operation init(Key& key, const void* value, void* landing, int32_t priority, Worker::Done done) {
  return {std::make_shared<SliceTransfer>(Kind::kInit, key, value, landing), std::move(done), priority};
}

Operation push(Key& key, const void* gradient, void* landing, int32_t priority, const RoundScalars& scalars,
               Worker::Done done) {
  return {std::make_shared<SliceTransfer>(Kind::kPush, key, gradient, landing), std::move(done), priority, scalars};
}

Operation skip(Key& key, void* landing, int32_t priority, Worker::Done done) {
  return {std::make_shared<SliceTransfer>(Kind::kSkip, key, nullptr, landing), std::move(done), priority};
}

Operation fetch(Key& key, uint8_t part, void* landing, Worker::Done done) {
  return {std::make_shared<SliceTransfer>(Kind::kFetch, key, nullptr, landing, part), std::move(done)};
}

Operation store(Key& key, uint8_t part, const void* content, Worker::Done done) {
  return {std::make_shared<SliceTransfer>(Kind::kStore, key, content, nullptr, part), std::move(done)};
}

Operation capture(Key& key, bool asks, uint64_t snapshot, float* residual, Worker::Done done) {
  RoundScalars scalars{};
  scalars.updates = static_cast<double>(snapshot);
  return {std::make_shared<CaptureTransfer>(key, asks, residual), std::move(done), 0, scalars};
}

// --- keys of rows --------------------------------------------------------------------------------------------------

std::vector<Operation> init_rows(Key& key, bool is_rank_0, const void* value, void* landing, int32_t priority,
                                 Worker::Done done) {
  const auto request = std::make_shared<RowsTransfer>(Kind::kInit, key, RowsView{}, nullptr);
  std::vector<Operation> operations;
  if (is_rank_0) {
    const auto store =
        std::make_shared<RowsTransfer>(Kind::kStore, key, row_ids(0, key.rows()), value, /*landing=*/nullptr);
    operations.push_back({store, nullptr, priority});
    operations.back().to_catch_up =
        std::make_shared<std::vector<Operation>>(init_rows(key, false, nullptr, landing, priority, done));
    const size_t bytes = landing == nullptr || landing == value ? 0 : key.elements * size_of(key.dtype);
    auto copied = [=, done = std::move(done)](const Error* error, bool updated) {
      if (error == nullptr && bytes > 0) std::memcpy(landing, value, bytes);
      done(error, updated);
    };
    operations.push_back({request, std::move(copied), priority});
    return operations;
  }
  operations.push_back({request, nullptr, priority});
  if (landing != nullptr) {
    const auto fetch =
        std::make_shared<RowsTransfer>(Kind::kFetch, key, row_ids(0, key.rows()), /*values=*/nullptr, landing);
    operations.push_back({fetch, nullptr, priority});
  }
  operations.back().done = std::move(done);
  return operations;
}

Operation push_rows(Key& key, const RowsView& gradient, void* landing, int32_t priority, const RoundScalars& scalars,
                    Worker::RowsDone done) {
  const auto rows = is_ascending(gradient.ids, gradient.count)
                        ? std::make_shared<RowsTransfer>(Kind::kPush, key, gradient, landing)
                        : std::make_shared<RowsTransfer>(
                              key, std::make_unique<const SortedRows>(gradient, key.dtype, key.row_elements), landing);
  auto told = [rows, done = std::move(done)](const Error* error, bool) {
    done(error, {rows->changed().data(), rows->changed().size(), nullptr});
  };
  return {rows, std::move(told), priority, scalars};
}

Operation skip_rows(Key& key, void* landing, int32_t priority, Worker::Done done) {
  return {std::make_shared<RowsTransfer>(Kind::kSkip, key, RowsView{}, landing), std::move(done), priority};
}

Operation fetch_rows(Key& key, uint8_t part, const RowsView& wanted, void* landing, int32_t priority,
                     Worker::Done done) {
  return {std::make_shared<RowsTransfer>(Kind::kFetch, key, wanted, landing, part), std::move(done), priority};
}

Operation store_rows(Key& key, uint8_t part, const RowsView& content, Worker::Done done) {
  return {std::make_shared<RowsTransfer>(Kind::kStore, key, content, nullptr, part), std::move(done)};
}

std::vector<Operation> move_rows(Key& key, const Successor& successor) {
  struct Share {
    std::vector<int64_t> ids;
    std::vector<char> rows;  // of one part after the other
  };
  const auto share = std::make_shared<Share>();
  share->ids = row_ids(successor.share.first, successor.share.count);
  share->rows.resize(share->ids.size() * key.row_elements * size_of(sum_type(key.dtype)));
  const RowsView rows{share->ids.data(), share->ids.size(), share->rows.data()};
  const auto keeps_share = [share](const Error*, bool) {};
  std::vector<Operation> operations;
  for (uint8_t part : successor.parts) {
    const auto fetch = std::make_shared<RowsTransfer>(Kind::kFetch, key, rows, share->rows.data(), part);
    const auto store = std::make_shared<RowsTransfer>(Kind::kStore, key, rows, nullptr, part);
    operations.push_back({fetch, keeps_share});
    operations.push_back({store, keeps_share});
    operations.back().successor = &successor;
  }
  operations.push_back({std::make_shared<RowsTransfer>(Kind::kInit, key, RowsView{}, nullptr), nullptr});
  operations.back().successor = &successor;
  return operations;
}

}  // namespace p3
