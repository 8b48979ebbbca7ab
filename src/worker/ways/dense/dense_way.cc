#include "worker/ways/dense/dense_way.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/simd.h"
#include "codec/dgc.h"
#include "worker/capture_transfer.h"
#include "worker/key.h"
#include "worker/ways/dense/machine_slices.h"
#include "worker/ways/dense/slice_transfer.h"
#include "worker/worker_impl.h"

namespace p3 {
namespace {

using Kind = Transfer::Kind;

constexpr char kNoResidual[] = "leaves nothing out of what it pushes, so the key has no residual";

// No push is under way, so nothing else touches the residual; it may be large, and no lock is held.
class ResidualCapture final : public CaptureTransfer {
 public:
  ResidualCapture(DenseWay& way, bool asks, float* copy) : CaptureTransfer(way.key, asks), way_(way), copy_(copy) {}

  std::vector<Frame> begin(const KeyPlan& plan, Header header) override {
    change_ = way_.residual.change;
    return CaptureTransfer::begin(plan, header);
  }
  void finish() override {
    const std::vector<float>& kept = change_.undo ? way_.residual.former : way_.residual.kept;
    float* const end =
        std::transform(kept.begin(), kept.end(), copy_, [factor = change_.factor](float one) { return factor * one; });
    if (way_.codec.makes_steps()) write_round(way_.steps.rounds_before + key_.round, end);
  }

 private:
  DenseWay& way_;
  float* const copy_;
  Residual::Change change_;
};

}  // namespace

void Residual::begin_round() {
  of_round_ = std::exchange(change, {});
  is_used_ = false;
}

float* Residual::of(const Slice& slice) {
  is_used_ = true;
  if (kept.empty()) return nullptr;
  float* const its = kept.data() + slice.offset;
  float* const before = former.empty() ? nullptr : former.data() + slice.offset;
  if (of_round_.undo) std::copy_n(before, slice.elements, its);
  if (of_round_.factor != 1) loop(slice.elements, [=, factor = of_round_.factor](size_t i) { its[i] *= factor; });
  if (before != nullptr) std::copy_n(its, slice.elements, before);
  return its;
}

// Where nothing has been pushed, the next round is to do what this one was.
void Residual::end_round() {
  if (is_used_) return;
  change.undo |= of_round_.undo;
  change.factor *= of_round_.factor;
}

DenseWay::DenseWay(Key& its_key, WayHost& host) : Way(its_key, host, kSliceFrames), codec(key.declared.codec) {
  residual.kept.resize(codec.residuals() * key.declared.elements);
  if (host.outlives_servers) landed.emplace();
}

Frame DenseWay::claim(uint32_t shard) {
  if (!landed) return {nothing_claimed()};
  const auto [offset, bytes] = bytes_of(shard);
  return landed->claim(shard, offset, bytes);
}

Frame DenseWay::owed(uint32_t shard) {
  if (!landed) return {nothing_claimed()};
  const auto [offset, bytes] = bytes_of(shard);
  return landed->owed(shard, offset, bytes);
}

std::pair<size_t, size_t> DenseWay::bytes_of(uint32_t shard) const {
  const Slice slice = slice_at(*key.plan, shard);
  const size_t size = size_of(key.plan->dtype);
  return {slice.offset * size, slice.elements * size};
}

void DenseWay::set_optimizer(const OptimizerSpec& spec) {
  if (!landed) return Way::set_optimizer(spec);
  if (optimizer) refuse("has an optimizer already");
  if (!is_float(key.declared.dtype)) refuse("is of whole numbers, and an optimizer updates floating point keys only");
  optimizer.emplace(spec);
}

void DenseWay::begin_replica() {
  if (replica) return;
  const size_t bytes = key.declared.elements * size_of(key.declared.dtype);
  landed->begin(slice_count(*key.plan), bytes);
  replica.emplace(*optimizer, key.declared.dtype, key.declared.elements, landed->at(0));
}

std::vector<Operation> DenseWay::init(const void* value, void* landing, int32_t priority, Worker::Done done) {
  require_landing(landing);
  const void* const jobs = host_.is_first ? value : nullptr;
  return {{std::make_shared<SliceTransfer>(Kind::kInit, *this, jobs, landing), std::move(done), priority}};
}

std::shared_ptr<Transfer> DenseWay::push(const void* gradient, void* landing, bool gated) {
  if (gated && steps.clip_norm > 0) refuse("is clipped, so its whole gradient must be there before any of it leaves");
  return std::make_shared<SliceTransfer>(Kind::kPush, *this, gradient, landing);
}

std::shared_ptr<Transfer> DenseWay::skip(void* landing, bool gated, bool goes_on) {
  if (!gated) require_landing(landing);
  return std::make_shared<SliceTransfer>(Kind::kSkip, *this, nullptr, landing, 0, goes_on);
}

std::shared_ptr<Transfer> DenseWay::fetch(uint8_t part, void* landing) {
  if (part > 0) require_state(part);
  return std::make_shared<SliceTransfer>(Kind::kFetch, *this, nullptr, landing, part);
}

std::shared_ptr<Transfer> DenseWay::store(uint8_t part, const void* content) {
  require_state(part);
  return std::make_shared<SliceTransfer>(Kind::kStore, *this, content, nullptr, part);
}

std::shared_ptr<Transfer> DenseWay::capture(bool asks, float* kept) {
  asks = asks && !optimizer;  // servers have sums
  if (kept == nullptr) return Way::capture(asks, kept);
  return std::make_shared<ResidualCapture>(with_residual(), asks, kept);
}

std::shared_ptr<MachineSum> DenseWay::sum_on(const Machine& machine, const KeyPlan& plan, uint64_t next_round) {
  return std::make_shared<MachineSlices>(machine, plan, next_round, *this);
}

void DenseWay::require_landing(const void* landing) const {
  if (landing == nullptr && key.declared.elements > 0) refuse("is dense, so it needs a landing array");
}

// Servers look for themselves.
void DenseWay::require_state(uint8_t part) const {
  if (optimizer && !Replica::has_state(*optimizer, key.declared.dtype, part))
    refuse("has no part " + std::to_string(part) + " of a state on this worker");
}

DenseWay& DenseWay::with_residual() {
  if (codec.residuals() == 0)
    host_.refuse_call("the compression of key '" + key.name + "' leaves nothing out, so the key has no residual");
  return *this;
}

// So that a loss scaler may change what is left out.
void DenseWay::require_no_push(bool of_machine) const {
  if (codec.makes_steps()) refuse("has deep gradient compression, which no loss scaler can be used with");
  const auto pushes = [skips = of_machine && key.machine_sum != nullptr](const Operation& one) {
    return one.transfer->kind == Kind::kPush || (skips && one.transfer->kind == Kind::kSkip);
  };
  if (std::any_of(key.operations.begin(), key.operations.end(), pushes))
    host_.refuse_call("the residual of key '" + key.name + "' cannot change while a push is under way");
}

// --- what Worker has for such keys alone ---------------------------------------------------------------------------

int Worker::declare(std::string name, uint64_t elements, DType dtype, const Compression& codec) {
  check(codec);
  KeyPlan declared;
  declared.elements = elements;
  declared.dtype = dtype;
  declared.codec = codec;
  return impl_->add_key<DenseWay>(std::move(name), declared);
}

void Worker::ask_for_round_alone(int key) {
  auto& way = impl_->way_of<DenseWay>(key, "is not dense, so it cannot be entered without its value");
  MutexLock lock(impl_->mutex_);
  way.key.next_init = InitPart::kRoundAlone;
}

void Worker::set_momentum(int key, double momentum, double clip_norm) {
  auto& way = impl_->way_of<DenseWay>(key, "is not dense, so it has no momentum");
  MutexLock lock(impl_->mutex_);
  if (!way.codec.makes_steps() || way.key.round > 0 || !(momentum >= 0 && clip_norm >= 0))
    impl_->refuse_call("key '" + way.key.name +
                       "' cannot have such a momentum: it is set before the first push, with deep gradient "
                       "compression, and neither it nor clip_norm is negative");
  way.steps.momentum = static_cast<float>(momentum);
  way.steps.clip_norm = clip_norm;
}

bool Worker::keeps_residual(int key) const { return impl_->key(key).declared.codec.residuals() > 0; }

size_t Worker::residual_floats(int key) const {
  const auto& way = impl_->way_of<DenseWay>(key, kNoResidual).with_residual();
  MutexLock lock(impl_->mutex_);
  return way.residual.kept.size() + (way.codec.makes_steps() ? kRoundFloats : 0);
}

void Worker::restore_residual(int key, const float* residual) {
  auto& way = impl_->way_of<DenseWay>(key, kNoResidual).with_residual();
  MutexLock lock(impl_->mutex_);
  if (way.key.round > 0)
    impl_->refuse_call("the residual of key '" + way.key.name + "' can only be restored before the key's first push");
  if (way.key.by_leader)
    impl_->refuse_call("the residual of key '" + way.key.name +
                       "' is kept by the leader of this machine: restore it there");
  std::vector<float>& kept = way.residual.kept;
  if (way.codec.makes_steps()) way.steps.rounds_before = read_round(residual + kept.size());
  std::copy_n(residual, kept.size(), kept.data());
}

void Worker::keep_former_residual(int key) {
  auto& way = impl_->way_of<DenseWay>(key, kNoResidual).with_residual();
  MutexLock lock(impl_->mutex_);
  way.require_no_push(/*of_machine=*/true);
  way.residual.former.resize(way.residual.kept.size());  // none, if the leader keeps it
}

void Worker::change_residual(int key, bool undo, double factor) {
  auto& way = impl_->way_of<DenseWay>(key, kNoResidual).with_residual();
  MutexLock lock(impl_->mutex_);
  way.require_no_push(/*of_machine=*/undo);
  if (way.key.by_leader) return;
  if (undo && way.residual.former.empty())
    impl_->refuse_call("what the residual of key '" + way.key.name + "' was before the last push has not been kept");
  if (!(factor >= 0) || !std::isfinite(factor))
    impl_->refuse_call("the residual of key '" + way.key.name + "' cannot be multiplied by " + std::to_string(factor));
  way.residual.change.undo |= undo && way.residual.was_used();
  way.residual.change.factor *= static_cast<float>(factor);
}

}  // namespace p3
