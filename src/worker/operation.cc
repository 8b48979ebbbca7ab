#include "worker/operation.h"

#include <cstring>
#include <numeric>
#include <utility>

namespace p3 {
namespace {

Operation operation_of(Operation::Kind kind, Worker::Done done, int32_t priority, uint8_t part,
                       std::shared_ptr<RowsTransfer> rows) {
  Operation operation{kind, std::move(done)};
  operation.priority = priority;
  operation.part = part;
  operation.rows = std::move(rows);
  return operation;
}

}  // namespace

std::vector<Operation> init_rows(const RowsShape& shape, bool is_rank_0, const void* value, void* landing,
                                 int32_t priority, Worker::Done done) {
  using Kind = RowsTransfer::Kind;
  std::vector<int64_t> all;
  if (is_rank_0 || landing != nullptr) all.resize(shape.rows);
  std::iota(all.begin(), all.end(), int64_t{0});
  const auto wish = std::make_shared<RowsTransfer>(Kind::kWish, RowsView{}, nullptr, uint8_t{0});

  std::vector<Operation> operations;
  if (is_rank_0) {
    const auto store = std::make_shared<RowsTransfer>(Kind::kStore, std::move(all), value, nullptr, uint8_t{0});
    operations.push_back(operation_of(Operation::Kind::kStore, nullptr, priority, 0, store));
    operations.back().to_catch_up =
        std::make_shared<std::vector<Operation>>(init_rows(shape, false, nullptr, landing, priority, done));
    const size_t bytes =
        landing == nullptr || landing == value ? 0 : shape.rows * shape.row_elements * size_of(shape.dtype);
    auto copied = [=, done = std::move(done)](const Error* error, bool updated) {
      if (error == nullptr && bytes > 0) std::memcpy(landing, value, bytes);
      done(error, updated);
    };
    operations.push_back(operation_of(Operation::Kind::kInit, std::move(copied), priority, 0, wish));
    return operations;
  }
  operations.push_back(operation_of(Operation::Kind::kInit, nullptr, priority, 0, wish));
  if (landing != nullptr) {
    const auto fetch = std::make_shared<RowsTransfer>(Kind::kFetch, std::move(all), nullptr, landing, uint8_t{0});
    operations.push_back(operation_of(Operation::Kind::kFetch, nullptr, priority, 0, fetch));
  }
  operations.back().done = std::move(done);
  return operations;
}

Operation push_rows(const RowsShape& shape, const RowsView& gradient, void* landing, int32_t priority,
                    const RoundScalars& scalars, Worker::RowsDone done) {
  const auto rows = is_ascending(gradient.ids, gradient.count)
                        ? std::make_shared<RowsTransfer>(RowsTransfer::Kind::kPush, gradient, landing, uint8_t{0})
                        : std::make_shared<RowsTransfer>(
                              std::make_unique<const SortedRows>(gradient, shape.dtype, shape.row_elements), landing);
  auto told = [rows, done = std::move(done)](const Error* error, bool) {
    done(error, {rows->changed().data(), rows->changed().size(), nullptr});
  };
  Operation operation = operation_of(Operation::Kind::kPush, std::move(told), priority, 0, rows);
  operation.scalars = scalars;
  return operation;
}

Operation skip_rows(void* landing, int32_t priority, Worker::Done done) {
  return operation_of(Operation::Kind::kSkip, std::move(done), priority, 0,
                      std::make_shared<RowsTransfer>(RowsTransfer::Kind::kSkip, RowsView{}, landing, uint8_t{0}));
}

Operation fetch_rows(uint8_t part, const RowsView& wished, void* landing, int32_t priority, Worker::Done done) {
  return operation_of(Operation::Kind::kFetch, std::move(done), priority, part,
                      std::make_shared<RowsTransfer>(RowsTransfer::Kind::kFetch, wished, landing, part));
}

Operation store_rows(uint8_t part, const RowsView& content, Worker::Done done) {
  return operation_of(Operation::Kind::kStore, std::move(done), 0, part,
                      std::make_shared<RowsTransfer>(RowsTransfer::Kind::kStore, content, nullptr, part));
}

std::vector<Operation> move_rows(const RowsShape& shape, const Successor& successor) {
  using Kind = RowsTransfer::Kind;
  struct Share {
    std::vector<int64_t> ids;
    std::vector<char> rows;  // of one part after the other
  };
  const auto share = std::make_shared<Share>();
  share->ids.resize(successor.share.count);
  std::iota(share->ids.begin(), share->ids.end(), static_cast<int64_t>(successor.share.first));
  share->rows.resize(share->ids.size() * shape.row_elements * size_of(sum_type(shape.dtype)));
  const RowsView rows{share->ids.data(), share->ids.size(), share->rows.data()};
  const auto keeps_share = [share](const Error*, bool) {};
  std::vector<Operation> operations;
  for (uint8_t part : successor.parts) {
    const auto fetch = std::make_shared<RowsTransfer>(Kind::kFetch, rows, share->rows.data(), part);
    const auto store = std::make_shared<RowsTransfer>(Kind::kStore, rows, nullptr, part);
    operations.push_back(operation_of(Operation::Kind::kFetch, keeps_share, 0, part, fetch));
    operations.push_back(operation_of(Operation::Kind::kStore, keeps_share, 0, part, store));
    operations.back().successor = &successor;
  }
  const auto wish = std::make_shared<RowsTransfer>(Kind::kWish, RowsView{}, nullptr, uint8_t{0});
  operations.push_back(operation_of(Operation::Kind::kInit, nullptr, 0, 0, wish));
  operations.back().successor = &successor;
  return operations;
}

}  // namespace p3
