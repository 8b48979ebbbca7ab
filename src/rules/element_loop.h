// Makes an optimizer of a rule for one element: the loop, compiled for that rule, in both types of arithmetic.
//
// `Element<T>` is made anew for each update of a slice, from the hyperparameters and the numbers of the round, which it
// keeps as T. Its operator() takes the element's weight, its gradient, and references to its states in their order.
// Only the rules include this file.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <utility>

#include "base/simd.h"
#include "p3/rule.h"

namespace p3::rules {

using State = Optimizer::State;

template <template <typename> class Element, typename Numbers, size_t... kState>
class ElementLoop final : public Optimizer {
 public:
  template <typename... States>
  explicit ElementLoop(const Numbers& numbers, const States&... states) : Optimizer({states...}), numbers_(numbers) {
    static_assert(sizeof...(States) == sizeof...(kState) && sizeof...(kState) <= kMostStates);
  }
  const Hyperparameters& rule() const override { return numbers_; }

 private:
  template <typename T>
  void step_as(T* weight, T* const* state, const T* gradient, size_t n, const RoundScalars& round) const {
    const Element<T> element(numbers_, round);
    const std::array<T*, kMostStates> states{state[kState]...};
    loop(n, [=](size_t i) { element(weight[i], gradient[i], states[kState][i]...); });
  }
  void step(float* weight, float* const* state, const float* gradient, size_t n,
            const RoundScalars& round) const override {
    step_as(weight, state, gradient, n, round);
  }
  void step(double* weight, double* const* state, const double* gradient, size_t n,
            const RoundScalars& round) const override {
    step_as(weight, state, gradient, n, round);
  }

  const Numbers numbers_;
};

template <template <typename> class Element, typename Numbers, size_t... kState, typename... States>
std::unique_ptr<Optimizer> numbered_loop(std::index_sequence<kState...>, const Numbers& numbers,
                                         const States&... states) {
  return std::make_unique<ElementLoop<Element, Numbers, kState...>>(numbers, states...);
}

// As many states as the element takes references.
template <template <typename> class Element, typename Numbers, typename... States>
std::unique_ptr<Optimizer> element_loop(const Numbers& numbers, const States&... states) {
  return numbered_loop<Element>(std::index_sequence_for<States...>(), numbers, states...);
}

// -1, 0 or 1; 0 for NaN, as in MXNet.
template <typename T>
T sign(T value) {
  return static_cast<T>(value > 0) - static_cast<T>(value < 0);
}

// Where a is NaN, the result is; a NaN in b loses to no number, as in MXNet.
template <typename T>
T maximum(T a, T b) {
  return ((a > b) | (a != a)) ? a : b;
}

}  // namespace p3::rules
