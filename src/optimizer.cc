#include "p3/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "p3/error.h"
#include "p3/simd.h"
#include "p3/sum.h"

namespace p3 {
namespace {

// MXNet's fused operators take their numbers as float32 whatever the tensor's type; P3 rounds the same way,
// or a float64 run would drift from MXNet's by the rounding of 0.9.
template <typename T>
T as_operator_does(double value) {
  // volatile: where it vectorises neighbouring conversions, GCC 12 takes double to float to double for nothing at all.
  const volatile float rounded = static_cast<float>(value);
  return static_cast<T>(rounded);
}

// Two unconditional selections, which vectorise. NaN passes. Without a bound, the bound is infinity: no branch.
template <typename T>
T clip(T value, T bound) {
  const T below = value > bound ? bound : value;
  return below < -bound ? -bound : below;
}

template <typename T>
T bound_of(double clip) {
  return clip < 0 ? std::numeric_limits<T>::infinity() : as_operator_does<T>(clip);
}

// One struct per algorithm: its numbers in the type of the arithmetic, and the update of one element in the order
// of operations of MXNet 1.9.1. References are the element's weight and states, in the order of kStates.

// MXNet uses its "multi" operators for every dense SGD, with and without momentum. They round lr * rescale first
// when nothing is clipped, and clip rescale * gradient otherwise; `outer` and `inner` cover both without a branch.
template <typename T, bool kMomentum>
struct SgdBase {
  static constexpr int kStates = kMomentum ? 1 : 0;
  T momentum, decay, outer, inner, bound;

  SgdBase(const OptimizerSpec& spec, const RoundScalars& round)
      : momentum(as_operator_does<T>(spec.momentum)),
        decay(as_operator_does<T>(round.lr) * as_operator_does<T>(round.wd)),
        outer(as_operator_does<T>(round.lr) * (spec.clip_gradient < 0 ? as_operator_does<T>(round.rescale) : T(1))),
        inner(spec.clip_gradient < 0 ? T(1) : as_operator_does<T>(round.rescale)),
        bound(bound_of<T>(spec.clip_gradient)) {}

  T velocity(T carried, T weight, T gradient) const {
    return carried - decay * weight - outer * clip(inner * gradient, bound);
  }
};

template <typename T>
struct Sgd : SgdBase<T, false> {
  using SgdBase<T, false>::SgdBase;
  void operator()(T& weight, T gradient) const { weight += this->velocity(T(0), weight, gradient); }
};

template <typename T>
struct SgdMomentum : SgdBase<T, true> {
  using SgdBase<T, true>::SgdBase;
  void operator()(T& weight, T gradient, T& velocity) const {
    velocity = this->velocity(this->momentum * velocity, weight, gradient);
    weight += velocity;
  }
};

// NAG without momentum is the plain SGD operator, which shrinks the weight before it subtracts.
template <typename T>
struct NagPlain : SgdBase<T, false> {
  using SgdBase<T, false>::SgdBase;
  void operator()(T& weight, T gradient) const {
    weight = (T(1) - this->decay) * weight - this->outer * clip(this->inner * gradient, this->bound);
  }
};

template <typename T>
struct NagMomentum {
  static constexpr int kStates = 1;
  T momentum, lr, wd, rescale, bound;

  NagMomentum(const OptimizerSpec& spec, const RoundScalars& round)
      : momentum(as_operator_does<T>(spec.momentum)),
        lr(as_operator_does<T>(round.lr)),
        wd(as_operator_does<T>(round.wd)),
        rescale(as_operator_does<T>(round.rescale)),
        bound(bound_of<T>(spec.clip_gradient)) {}

  // The velocity decays with the weight as it is after the update: MXNet writes the weight first.
  void operator()(T& weight, T gradient, T& velocity) const {
    const T carried = momentum * velocity;
    const T clipped = clip(rescale * gradient, bound);
    weight = weight - carried + (momentum + T(1)) * (carried - lr * (clipped + wd * weight));
    velocity = carried - lr * (clipped + wd * weight);
  }
};

template <typename T>
struct Adam {
  static constexpr int kStates = 2;
  T beta1, beta2, epsilon, lr, wd, rescale, bound;

  Adam(const OptimizerSpec& spec, const RoundScalars& round)
      : beta1(as_operator_does<T>(spec.beta1)),
        beta2(as_operator_does<T>(spec.beta2)),
        epsilon(as_operator_does<T>(spec.epsilon)),
        lr(as_operator_does<T>(round.lr)),
        wd(as_operator_does<T>(round.wd)),
        rescale(as_operator_does<T>(round.rescale)),
        bound(bound_of<T>(spec.clip_gradient)) {}

  void operator()(T& weight, T gradient, T& mean, T& variance) const {
    const T g = clip(gradient * rescale + weight * wd, bound);
    mean = beta1 * mean + (T(1) - beta1) * g;
    variance = beta2 * variance + (T(1) - beta2) * g * g;
    weight = weight - lr * mean / (std::sqrt(variance) + epsilon);
  }
};

// AdaGrad is written in Python in MXNet, so its numbers stay in double until they meet the tensor.
template <typename T>
struct AdaGrad {
  static constexpr int kStates = 1;
  T epsilon, negative_lr, wd, rescale, bound;

  AdaGrad(const OptimizerSpec& spec, const RoundScalars& round)
      : epsilon(static_cast<T>(spec.epsilon)),
        negative_lr(static_cast<T>(-round.lr)),
        wd(static_cast<T>(round.wd)),
        rescale(static_cast<T>(round.rescale)),
        bound(bound_of<T>(spec.clip_gradient)) {}

  void operator()(T& weight, T gradient, T& history) const {
    const T g = clip(gradient * rescale, bound);
    history += g * g;
    weight += (g / std::sqrt(history + epsilon) + weight * wd) * negative_lr;
  }
};

template <typename T>
struct RmsPropBase {
  T gamma1, gamma2, epsilon, lr, wd, rescale, bound, weight_bound;

  RmsPropBase(const OptimizerSpec& spec, const RoundScalars& round)
      : gamma1(as_operator_does<T>(spec.gamma1)),
        gamma2(as_operator_does<T>(spec.gamma2)),
        epsilon(as_operator_does<T>(spec.epsilon)),
        lr(as_operator_does<T>(round.lr)),
        wd(as_operator_does<T>(round.wd)),
        rescale(as_operator_does<T>(round.rescale)),
        bound(bound_of<T>(spec.clip_gradient)),
        weight_bound(bound_of<T>(spec.clip_weights)) {}

  T decayed(T gradient, T weight) const { return clip(rescale * gradient + wd * weight, bound); }
};

template <typename T>
struct RmsProp : RmsPropBase<T> {
  static constexpr int kStates = 1;
  using RmsPropBase<T>::RmsPropBase;

  void operator()(T& weight, T gradient, T& square) const {
    const T g = this->decayed(gradient, weight);
    square = (T(1) - this->gamma1) * (g * g) + this->gamma1 * square;
    weight = clip(weight - this->lr * (g / std::sqrt(square + this->epsilon)), this->weight_bound);
  }
};

template <typename T>
struct RmsPropCentered : RmsPropBase<T> {
  static constexpr int kStates = 3;
  using RmsPropBase<T>::RmsPropBase;

  void operator()(T& weight, T gradient, T& square, T& mean, T& delta) const {
    const T g = this->decayed(gradient, weight);
    square = (T(1) - this->gamma1) * g * g + this->gamma1 * square;
    mean = (T(1) - this->gamma1) * g + this->gamma1 * mean;
    delta = this->gamma2 * delta - this->lr * g / std::sqrt(square - mean * mean + this->epsilon);
    weight = clip(weight + delta, this->weight_bound);
  }
};

constexpr int kMaxStates = 3;

template <typename Rule, typename T, size_t... kState>
void run(const Rule& rule, T* weight, T* const* state, const T* gradient, size_t n, std::index_sequence<kState...>) {
  const std::array<T*, kMaxStates> states{state[kState]...};
  loop(n, [=](size_t i) { rule(weight[i], gradient[i], states[kState][i]...); });
}

// Gives a rule the two types of arithmetic that Optimizer asks for.
template <template <typename> class Rule>
class ElementWise final : public Optimizer {
 public:
  explicit ElementWise(const OptimizerSpec& spec) : Optimizer(spec) {}
  int state_count() const override { return Rule<float>::kStates; }

 private:
  template <typename T>
  void step_as(T* weight, T* const* state, const T* gradient, size_t n, const RoundScalars& round) const {
    static_assert(Rule<T>::kStates <= kMaxStates);
    run(Rule<T>(spec(), round), weight, state, gradient, n, std::make_index_sequence<Rule<T>::kStates>());
  }
  void step(float* weight, float* const* state, const float* gradient, size_t n,
            const RoundScalars& round) const override {
    step_as(weight, state, gradient, n, round);
  }
  void step(double* weight, double* const* state, const double* gradient, size_t n,
            const RoundScalars& round) const override {
    step_as(weight, state, gradient, n, round);
  }
};

template <template <typename> class Rule>
std::unique_ptr<const Optimizer> make_rule(const OptimizerSpec& spec) {
  return std::make_unique<const ElementWise<Rule>>(spec);
}

// NaN is outside of every range, because it compares false.
void check(const char* field, double value, bool in_range, const char* range) {
  if (in_range) return;
  std::ostringstream text;
  text << "optimizer: " << field << " is " << value << "; it must be " << range;
  throw Error(ErrorKind::kUsage, text.str());
}

void check_spec(const OptimizerSpec& spec) {
  const auto at_least_0 = [](const char* field, double value) {
    check(field, value, value >= 0 && std::isfinite(value), "finite and at least 0");
  };
  const auto fraction = [](const char* field, double value) {
    check(field, value, value >= 0 && value < 1, "at least 0 and below 1");
  };
  const auto finite = [](const char* field, double value) {
    check(field, value, std::isfinite(value), "finite (negative: no clipping)");
  };
  at_least_0("momentum", spec.momentum);
  fraction("beta1", spec.beta1);
  fraction("beta2", spec.beta2);
  at_least_0("epsilon", spec.epsilon);
  fraction("gamma1", spec.gamma1);
  at_least_0("gamma2", spec.gamma2);
  finite("clip_gradient", spec.clip_gradient);
  finite("clip_weights", spec.clip_weights);
}

}  // namespace

std::unique_ptr<const Optimizer> Optimizer::make(const OptimizerSpec& spec) {
  check_spec(spec);
  switch (spec.algorithm) {
    case Algorithm::kSgd:
      return spec.momentum > 0 ? make_rule<SgdMomentum>(spec) : make_rule<Sgd>(spec);
    case Algorithm::kNag:
      return spec.momentum > 0 ? make_rule<NagMomentum>(spec) : make_rule<NagPlain>(spec);
    case Algorithm::kAdam:
      return make_rule<Adam>(spec);
    case Algorithm::kAdaGrad:
      return make_rule<AdaGrad>(spec);
    case Algorithm::kRmsProp:
      return make_rule<RmsProp>(spec);
    case Algorithm::kRmsPropCentered:
      return make_rule<RmsPropCentered>(spec);
  }
  throw Error(ErrorKind::kUsage,
              "optimizer: algorithm code " + std::to_string(static_cast<int>(spec.algorithm)) + " is unknown");
}

void Optimizer::update(DType weight_type, void* weight, void* master, void* const* state, const void* gradient,
                       size_t elements, const RoundScalars& round) const {
  if (weight_type == DType::kFloat64) {
    std::array<double*, kMaxStates> states{};
    for (int s = 0; s < state_count(); ++s) states[static_cast<size_t>(s)] = static_cast<double*>(state[s]);
    return step(static_cast<double*>(weight), states.data(), static_cast<const double*>(gradient), elements, round);
  }
  if (!is_float(weight_type))
    throw Error(ErrorKind::kUsage, std::string("optimizer: weights of type ") + name_of(weight_type) +
                                       " cannot be updated on the server; use float32, float64 or float16");

  std::array<float*, kMaxStates> states{};
  for (int s = 0; s < state_count(); ++s) states[static_cast<size_t>(s)] = static_cast<float*>(state[s]);
  const float* gradients = static_cast<const float*>(gradient);
  if (weight_type == DType::kFloat32)
    return step(static_cast<float*>(weight), states.data(), gradients, elements, round);

  // Half precision in blocks that stay in the first-level cache, so that memory is still passed over once.
  constexpr size_t kBlock = 1024;
  float widened[kBlock];
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t n = std::min(kBlock, elements - begin);
    void* halves = static_cast<char*>(weight) + begin * size_of(DType::kFloat16);
    float* block = master != nullptr ? static_cast<float*>(master) + begin : widened;
    if (master == nullptr) start_sum(DType::kFloat16, block, halves, n);
    step(block, states.data(), gradients + begin, n, round);
    finish_sum(DType::kFloat16, halves, block, n);
    for (int s = 0; s < state_count(); ++s) states[static_cast<size_t>(s)] += n;
  }
}

}  // namespace p3
