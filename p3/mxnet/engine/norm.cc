#include "norm.h"

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "p3/key_plan.h"

namespace p3 {

void MXNetNorm::tell(NDArrayHandle before, NDArrayHandle norm, uint64_t elements, Priority priority) {
  enqueue(priority, "norm of the round before", before, norm, [this, elements, priority](const Operation& operation) {
    begin(landing_address(operation.output()), elements, priority, operation.done(), /*goes_on=*/true);
  });
}

void MXNetNorm::skip(NDArrayHandle norm, uint64_t elements, Priority priority, Worker::Done done) {
  begin(
      landing_address(norm), elements, priority,
      [kept = api_.keep(norm), done = std::move(done)](const Error* error, bool updated) { done(error, updated); },
      /*goes_on=*/false);
}

void MXNetNorm::factor(NDArrayHandle norm, NDArrayHandle factor, double max_norm, Priority priority) {
  enqueue(priority, "norm", norm, factor, [this, max_norm](const Operation& operation) {
    const double known = *static_cast<const float*>(operation.input_address());
    const double wanted = max_norm / (known + 1e-8);
    *static_cast<float*>(landing_address(operation.output())) = static_cast<float>(wanted > 1 ? 1 : wanted);
    operation.done()(nullptr, true);
  });
}

// Servers are added up in their order: the same bits on every worker. Not a number, and infinite, stay what they are.
void MXNetNorm::begin(void* norm, uint64_t elements, Priority priority, Worker::Done done, bool goes_on) {
  const auto parts = std::make_shared<std::vector<double>>(elements);
  worker_.skip(
      handle_, parts->data(), priority.in_queues,
      [norm, parts, done = std::move(done)](const Error* error, bool updated) {
        double squares = 0;
        for (size_t i = 0; i < parts->size(); i += kNormElements) squares += (*parts)[i];
        if (!error) *static_cast<float*>(norm) = static_cast<float>(std::sqrt(squares));
        done(error, updated);
      },
      /*gated=*/false, goes_on);
}

}  // namespace p3
