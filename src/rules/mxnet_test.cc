// MXNet's Test, which its own tests train with: the gradient is added, and the state is the weight. Nothing is clipped.

#include "rules/mxnet.h"

namespace p3::rules {
namespace {

struct TestNumbers final : Hyperparameters {
  double clip_gradient;

  explicit TestNumbers(Fields& fields) : clip_gradient(fields.clipping("clip_gradient")) {}
};

template <typename T>
struct Test : Composed<T> {
  using Composed<T>::rescale, Composed<T>::Composed;

  void operator()(T& weight, T gradient, T& copy) const {
    weight += gradient * rescale;
    copy = weight;
  }
};

}  // namespace

std::unique_ptr<Optimizer> mxnet_test(Fields& fields) { return element_loop<Test>(TestNumbers(fields), State{"copy"}); }

}  // namespace p3::rules
