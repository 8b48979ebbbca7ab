#include "machine_sum.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace p3 {

MachineSum::MachineSum(const KeyPlan& plan, int workers, BufferPool& buffers) : plan_(plan), buffers_(buffers) {
  const auto places = static_cast<size_t>(workers);
  for (uint32_t i = 0; i < slice_count(plan); ++i)
    slices_.push_back({RankSum(workers, plan.dtype, slice_at(plan, i).elements, buffers),
                       std::vector<uint64_t>(places, 0),
                       std::vector<void*>(places, nullptr),
                       1,
                       {},
                       -1,
                       nullptr});
}

MachineSum::~MachineSum() {
  for (SliceSum& slice : slices_) {
    if (slice.leaving != nullptr) buffers_.give_back(slice.leaving, slice.sum.bytes());
    for (void* gradient : slice.gradient)
      if (gradient != nullptr) buffers_.give_back(gradient, slice.sum.bytes());
  }
}

const char* MachineSum::problem_with(int place, const Header& push) const {
  if (push.slice >= slices_.size()) return "of no slice of its key";
  const SliceSum& slice = slices_[push.slice];
  const auto encoding = static_cast<Encoding>(push.encoding);
  if (push.of_machine != 0) return "marked as a whole machine's";
  if (static_cast<DType>(push.dtype) != plan_.dtype) return "of another element type than agreed";
  if (encoding != Encoding::kPlain && encoding != Encoding::kAbsent) return "in another encoding than agreed";
  if (push.payload_bytes != (encoding == Encoding::kAbsent ? 0 : slice.sum.bytes()))
    return "of another size than agreed";
  if (push.round != slice.round || slice.came[static_cast<size_t>(place)] >= push.round) return "out of turn";
  return nullptr;
}

void* MachineSum::room_for(int place, const Header& push) {
  SliceSum& slice = slices_[push.slice];
  slice.came[static_cast<size_t>(place)] = push.round;
  if (static_cast<Encoding>(push.encoding) == Encoding::kAbsent) return nullptr;
  return slice.gradient[static_cast<size_t>(place)] = buffers_.take(slice.sum.bytes());
}

void MachineSum::bring(const Header& push, const void* gradient) {
  void* room = room_for(0, push);
  if (room != nullptr) std::memcpy(room, gradient, push.payload_bytes);
}

std::optional<uint64_t> MachineSum::waits_for(int place) const {
  for (const SliceSum& slice : slices_) {
    const uint64_t last = *std::max_element(slice.came.begin(), slice.came.end());
    if (slice.came[static_cast<size_t>(place)] < last) return last;
  }
  return {};
}

int MachineSum::add(int place, const Header& push) {
  SliceSum& slice = slices_[push.slice];
  void* gradient = std::exchange(slice.gradient[static_cast<size_t>(place)], nullptr);
  int contradicts = -1;
  if (place == 0) {  // the leader's, but for the scalars if it has no gradient
    const RoundScalars scalars = slice.push.scalars;
    const uint16_t contributors = slice.push.contributors;
    slice.push = push;
    slice.push.contributors = contributors;
    if (slice.first >= 0) slice.push.scalars = scalars;
  }
  if (gradient != nullptr) {
    ++slice.push.contributors;
    if (slice.first < 0) {
      slice.first = place;
      slice.push.scalars = push.scalars;
    } else if (std::memcmp(&push.scalars, &slice.push.scalars, sizeof push.scalars) != 0) {
      contradicts = slice.first;
    }
  }
  slice.sum.add(place, gradient);
  return contradicts;
}

Frame MachineSum::take(uint32_t index) {
  SliceSum& slice = slices_[index];
  slice.leaving = slice.sum.take_rounded();
  Frame frame;
  frame.header = std::exchange(slice.push, {});
  frame.header.of_machine = 1;
  frame.header.encoding = static_cast<uint8_t>(slice.leaving == nullptr ? Encoding::kAbsent : Encoding::kPlain);
  frame.header.payload_bytes = slice.leaving == nullptr ? 0 : static_cast<uint32_t>(slice.sum.bytes());
  frame.payload = slice.leaving;
  slice.first = -1;
  ++slice.round;
  return frame;
}

void MachineSum::left(uint32_t index) {
  SliceSum& slice = slices_[index];
  if (slice.leaving != nullptr) buffers_.give_back(std::exchange(slice.leaving, nullptr), slice.sum.bytes());
}

}  // namespace p3
