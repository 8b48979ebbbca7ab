// MXNet's FTRL.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct FtrlNumbers final : Hyperparameters {
  double lamda1;  // L1 regularisation, spelt as in MXNet
  double beta;    // damps the first rates
  double clip_gradient;

  explicit FtrlNumbers(Fields& fields)
      : lamda1(fields.at_least_0("lamda1", 0.01)),
        beta(fields.at_least_0("beta", 1)),
        clip_gradient(fields.clipping("clip_gradient")) {}
};

template <typename T>
struct Ftrl : Fused<T> {
  using Fused<T>::lr, Fused<T>::wd, Fused<T>::rescale, Fused<T>::bound;
  T lamda1, beta;

  Ftrl(const FtrlNumbers& numbers, const RoundScalars& round)
      : Fused<T>(numbers, round),
        lamda1(as_operator_does<T>(numbers.lamda1)),
        beta(as_operator_does<T>(numbers.beta)) {}

  void operator()(T& weight, T gradient, T& lead, T& square) const {
    const T g = clip(rescale * gradient, bound);
    const T total = square + g * g;
    lead += g - (std::sqrt(total) - std::sqrt(square)) * weight / lr;
    square = total;
    const T outside = sign(maximum(std::abs(lead) - lamda1, T(0)));  // or GCC makes a branch of the comparison
    weight = (sign(lead) * lamda1 - lead) / ((beta + std::sqrt(square)) / lr + wd) * outside;
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_ftrl(Fields& fields) {
  return element_loop<Ftrl>(FtrlNumbers(fields), State{"lead"}, State{"square"});
}

}  // namespace p3::rules
