#include "numeric/rank_row_sum.h"

#include <utility>

namespace p3 {

RankRowSum::RankRowSum(int places, const KeyPlan& plan, const RowRange& range, BufferPool& pool, bool in_order,
                       bool whole_pushes)
    : plan_(plan),
      range_(range),
      row_bytes_(plan.row_elements * size_of(plan.dtype)),
      pool_(pool),
      in_order_(in_order),
      whole_pushes_(whole_pushes),
      sum_(plan.dtype, plan.row_elements, range, pool),
      senders_(static_cast<size_t>(places)) {}

const char* RankRowSum::read(int place, PooledBuffer payload, size_t bytes, Frame& frame) {
  frame.payload = std::move(payload);
  Sender& sender = senders_[static_cast<size_t>(place)];
  return read_rows(plan_, range_, row_bytes_, frame.payload.data(), bytes, sender.next_row, frame.rows);
}

void RankRowSum::add(int place, Frame frame) {
  Sender& sender = senders_[static_cast<size_t>(place)];
  const bool last = frame.rows.header.last == 1;
  sender.rows += frame.rows.ids.size();
  if (in_order_ || whole_pushes_)
    sender.early.push_back(std::move(frame));
  else
    sum_.add(frame.rows);
  if (last)
    came_all(place);
  else
    take_turns();
}

void RankRowSum::came_all(int place) {
  Sender& sender = senders_[static_cast<size_t>(place)];
  sender.last = true;
  ++complete_;
  if (!in_order_) {
    for (const Frame& frame : sender.early) sum_.add(frame.rows);
    sender.early.clear();
  }
  take_turns();
}

void RankRowSum::forget_part_of(int place) {
  Sender& sender = senders_[static_cast<size_t>(place)];
  if (!sender.last) sender = {};
}

void RankRowSum::take_turns() {
  for (; next_ < senders_.size(); ++next_) {
    Sender& sender = senders_[next_];
    if (whole_pushes_ && !sender.last) return;
    for (const Frame& frame : sender.early) sum_.add(frame.rows);
    sender.early.clear();
    if (!sender.last) return;
  }
}

RankRowSum::Frame RankRowSum::take_rounded() {
  Frame frame;
  frame.rows.ids = sum_.ids();
  frame.rows.header.coding = IdCoding::kGaps;
  frame.rows.header.last = 1;
  frame.rows.row_bytes = row_bytes_;
  frame.payload = PooledBuffer(pool_, BufferPool::roomy(frame.rows.ids.size() * row_bytes_));
  char* values = static_cast<char*>(frame.payload.data());
  frame.rows.values = values;
  for (int64_t row : frame.rows.ids) {
    sum_.write_row(row, values);
    values += row_bytes_;
  }
  clear();
  return frame;
}

void RankRowSum::clear() {
  sum_.clear();
  for (Sender& sender : senders_) sender = {};
  complete_ = next_ = 0;
}

}  // namespace p3
