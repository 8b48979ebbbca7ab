#include "p3/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>
#include <utility>

#include "base/simd.h"
#include "numeric/optimizer_rules.h"
#include "numeric/sum.h"
#include "numeric/torch_rules.h"
#include "p3/error.h"

namespace p3 {
namespace {

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
  fraction("rho", spec.rho);
  at_least_0("beta", spec.beta);
  at_least_0("lamda1", spec.lamda1);
  at_least_0("lamda", spec.lamda);
  at_least_0("wd_lh", spec.wd_lh);
  at_least_0("schedule_decay", spec.schedule_decay);
  check("dampening", spec.dampening, std::isfinite(spec.dampening), "finite");
  at_least_0("alpha", spec.alpha);
  at_least_0("initial_accumulator_value", spec.initial_accumulator_value);
  finite("clip_gradient", spec.clip_gradient);
  finite("clip_weights", spec.clip_weights);
}

}  // namespace

std::unique_ptr<const Optimizer> Optimizer::make(const OptimizerSpec& spec) {
  check_spec(spec);
  const bool moves = spec.momentum > 0;
  switch (spec.algorithm) {
    case Algorithm::kSgd:
      return moves ? make_rule<rules::SgdMomentum>(spec) : make_rule<rules::Sgd>(spec);
    case Algorithm::kNag:
      return moves ? make_rule<rules::NagMomentum>(spec) : make_rule<rules::NagPlain>(spec);
    case Algorithm::kAdam:
      return make_rule<rules::Adam>(spec);
    case Algorithm::kAdaGrad:
      return make_rule<rules::AdaGrad>(spec);
    case Algorithm::kRmsProp:
      return make_rule<rules::RmsProp>(spec);
    case Algorithm::kRmsPropCentered:
      return make_rule<rules::RmsPropCentered>(spec);
    case Algorithm::kSignum:
      return moves ? make_rule<rules::Signum>(spec) : make_rule<rules::SignSgd>(spec);
    case Algorithm::kFtml:
      return make_rule<rules::Ftml>(spec);
    case Algorithm::kFtrl:
      return make_rule<rules::Ftrl>(spec);
    case Algorithm::kAdaDelta:
      return make_rule<rules::AdaDelta>(spec);
    case Algorithm::kAdamax:
      return make_rule<rules::Adamax>(spec);
    case Algorithm::kNadam:
      return make_rule<rules::Nadam>(spec);
    case Algorithm::kDcAsgd:
      return moves ? make_rule<rules::DcAsgdMomentum>(spec) : make_rule<rules::DcAsgd>(spec);
    case Algorithm::kTest:
      return make_rule<rules::Test>(spec);
    case Algorithm::kTorchSgd:
      return moves ? make_rule<rules::TorchSgdMomentum>(spec) : make_rule<rules::TorchSgd>(spec);
    case Algorithm::kTorchAdam:
      return spec.amsgrad ? make_rule<rules::TorchAmsgrad>(spec) : make_rule<rules::TorchAdam>(spec);
    case Algorithm::kTorchAdaGrad:
      return make_rule<rules::TorchAdaGrad>(spec);
    case Algorithm::kTorchRmsProp:
      if (spec.centered)
        return moves ? make_rule<rules::TorchRmsPropCenteredMomentum>(spec)
                     : make_rule<rules::TorchRmsPropCentered>(spec);
      return moves ? make_rule<rules::TorchRmsPropMomentum>(spec) : make_rule<rules::TorchRmsProp>(spec);
  }
  throw Error(ErrorKind::kUsage,
              "optimizer: algorithm code " + std::to_string(static_cast<int>(spec.algorithm)) + " is unknown");
}

void Optimizer::start_state(DType weight_type, const void* weight, void* const* state, size_t elements) const {
  const size_t bytes = elements * size_of(sum_type(weight_type));
  for (int s = 0; s < state_count(); ++s) std::fill_n(static_cast<char*>(state[s]), bytes, char{0});
  if (spec_.algorithm == Algorithm::kDcAsgd) start_sum(weight_type, state[state_count() - 1], weight, elements);
  if (spec_.algorithm != Algorithm::kTorchAdaGrad) return;
  if (weight_type == DType::kFloat64)
    std::fill_n(static_cast<double*>(state[0]), elements, spec_.initial_accumulator_value);
  else
    std::fill_n(static_cast<float*>(state[0]), elements, static_cast<float>(spec_.initial_accumulator_value));
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
                                       " cannot be updated on the server; use float32, float64, float16 or bfloat16");

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
    void* halves = static_cast<char*>(weight) + begin * size_of(weight_type);
    float* block = master != nullptr ? static_cast<float*>(master) + begin : widened;
    if (master == nullptr) start_sum(weight_type, block, halves, n);
    step(block, states.data(), gradients + begin, n, round);
    finish_sum(weight_type, halves, block, n);
    for (int s = 0; s < state_count(); ++s) states[static_cast<size_t>(s)] += n;
  }
}

}  // namespace p3
