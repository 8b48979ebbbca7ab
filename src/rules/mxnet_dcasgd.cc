// MXNet's DCASGD, which compensates delays.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct DcAsgdNumbers final : Hyperparameters {
  double momentum;
  double lamda;  // strength of the compensation
  double clip_gradient;

  explicit DcAsgdNumbers(Fields& fields)
      : momentum(fields.at_least_0("momentum", 0)),
        lamda(fields.at_least_0("lamda", 0.04)),
        clip_gradient(fields.clipping("clip_gradient")) {}
};

// The last state is the previous weight, which starts as the weight itself.
template <typename T>
struct DcAsgdBase : Composed<T> {
  T momentum, lamda;

  DcAsgdBase(const DcAsgdNumbers& numbers, const RoundScalars& round)
      : Composed<T>(numbers, round), momentum(static_cast<T>(numbers.momentum)), lamda(static_cast<T>(numbers.lamda)) {}

  T descent(T weight, T gradient, T previous) const {
    const T g = clip(gradient * this->rescale, this->bound);
    return -this->lr * (g + this->wd * weight + lamda * g * g * (weight - previous));
  }
};

template <typename T>
struct DcAsgd : DcAsgdBase<T> {
  using DcAsgdBase<T>::DcAsgdBase;

  void operator()(T& weight, T gradient, T& previous) const {
    const T change = this->descent(weight, gradient, previous);
    previous = weight;
    weight += change;
  }
};

template <typename T>
struct DcAsgdMomentum : DcAsgdBase<T> {
  using DcAsgdBase<T>::DcAsgdBase;

  void operator()(T& weight, T gradient, T& velocity, T& previous) const {
    velocity = velocity * this->momentum + this->descent(weight, gradient, previous);
    previous = weight;
    weight += velocity;
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_dcasgd(Fields& fields) {
  const DcAsgdNumbers numbers(fields);
  const State previous{"previous", 0, /*is_weight=*/true};
  if (numbers.momentum > 0) return element_loop<DcAsgdMomentum>(numbers, State{"velocity"}, previous);
  return element_loop<DcAsgd>(numbers, previous);
}

}  // namespace p3::rules
