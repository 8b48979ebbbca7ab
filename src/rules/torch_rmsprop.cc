// PyTorch's RMSprop.

#include <tuple>

#include "rules/torch.h"

namespace p3::rules {
namespace {

struct RmsPropNumbers final : Hyperparameters {
  double alpha;  // decay of the averages
  double epsilon, momentum;
  bool centered, maximize;

  explicit RmsPropNumbers(Fields& fields)
      : alpha(fields.at_least_0("alpha", 0.99)),
        epsilon(fields.at_least_0("epsilon", 1e-8)),
        momentum(fields.at_least_0("momentum", 0)),
        centered(fields.flag("centered")),
        maximize(fields.flag("maximize")) {}
};

// States: square_avg, momentum_buffer with momentum, grad_avg where it is centered.
template <typename T, bool kMomentum, bool kCentered>
struct TorchRmsPropBase : Torch<T> {
  T alpha, share, epsilon, momentum;
  Lerp<T> lerp;

  TorchRmsPropBase(const RmsPropNumbers& numbers, const RoundScalars& round)
      : Torch<T>(numbers, round),
        alpha(static_cast<T>(numbers.alpha)),
        share(static_cast<T>(1 - numbers.alpha)),
        epsilon(static_cast<T>(numbers.epsilon)),
        momentum(static_cast<T>(numbers.momentum)),
        lerp(share) {}

  template <typename... More>
  void operator()(T& weight, T gradient, T& square, More&... more) const {
    const T g = this->decayed(gradient, weight);
    square = std::fma(share * g, g, square * alpha);
    T variance = square;
    if constexpr (kCentered) {
      T& mean = std::get<kMomentum>(std::tie(more...));
      mean = lerp(mean, g);
      variance = std::fma(-mean, mean, square);
    }
    const T deviation = std::sqrt(variance) + epsilon;
    if constexpr (kMomentum) {
      T& velocity = std::get<0>(std::tie(more...));
      velocity = velocity * momentum + g / deviation;
      weight = std::fma(this->minus_lr, velocity, weight);
    } else {
      weight += this->minus_lr * g / deviation;
    }
  }
};
template <typename T>
using TorchRmsProp = TorchRmsPropBase<T, false, false>;
template <typename T>
using TorchRmsPropMomentum = TorchRmsPropBase<T, true, false>;
template <typename T>
using TorchRmsPropCentered = TorchRmsPropBase<T, false, true>;
template <typename T>
using TorchRmsPropCenteredMomentum = TorchRmsPropBase<T, true, true>;

}  // namespace

std::unique_ptr<Optimizer> torch_rmsprop(Fields& fields) {
  const RmsPropNumbers numbers(fields);
  const State square{"square_avg"}, velocity{"momentum_buffer"}, mean{"grad_avg"};
  const bool moves = numbers.momentum > 0;
  if (numbers.centered && moves) return element_loop<TorchRmsPropCenteredMomentum>(numbers, square, velocity, mean);
  if (numbers.centered) return element_loop<TorchRmsPropCentered>(numbers, square, mean);
  if (moves) return element_loop<TorchRmsPropMomentum>(numbers, square, velocity);
  return element_loop<TorchRmsProp>(numbers, square);
}

}  // namespace p3::rules
