// The optimizers that run on the server, on one slice at a time.
//
// Arithmetic follows MXNet 1.9.1's operators, or PyTorch 2.13's, in the same order of operations, so that training with
// P3 and on one process agree to rounding. All of them are element-wise: a slice needs nothing from its neighbours.
// Threads: an Optimizer is immutable after make(); update() may run on many slices at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "p3/dtype.h"

namespace p3 {

enum class Algorithm : uint8_t {
  kSgd = 0,
  kNag = 1,
  kAdam = 2,
  kAdaGrad = 3,
  kRmsProp = 4,
  kRmsPropCentered = 5,
  kSignum = 6,
  kFtml = 7,
  kFtrl = 8,
  kAdaDelta = 9,
  kAdamax = 10,
  kNadam = 11,
  kDcAsgd = 12,
  kTest = 13,
  kTorchSgd = 14,
  kTorchAdam = 15,
  kTorchAdaGrad = 16,
  kTorchRmsProp = 17,
};

// What set_optimizer announces, once: a name and numbers, never code.
struct OptimizerSpec {
  Algorithm algorithm = Algorithm::kSgd;
  double momentum = 0;                   // sgd, nag, signum, dcasgd, torch_sgd, torch_rmsprop
  double beta1 = 0;                      // adam, adamax, nadam, ftml, torch_adam
  double beta2 = 0;                      // adam, adamax, nadam, ftml, torch_adam
  double epsilon = 0;                    // adam, adagrad, rmsprop, centered, ftml, adadelta, nadam, torch_* (no sgd)
  double gamma1 = 0;                     // rmsprop, centered: decay of the averages
  double gamma2 = 0;                     // centered: momentum
  double rho = 0;                        // adadelta: decay of the averages
  double beta = 0;                       // ftrl: what damps the first rates
  double lamda1 = 0;                     // ftrl: L1 regularisation, spelt as in MXNet
  double lamda = 0;                      // dcasgd: strength of the compensation
  double wd_lh = 0;                      // signum: decay apart from the gradient
  double schedule_decay = 0;             // nadam
  double dampening = 0;                  // torch_sgd
  double alpha = 0;                      // torch_rmsprop: decay of the averages
  double initial_accumulator_value = 0;  // torch_adagrad: of the state
  bool nesterov = false;                 // torch_sgd
  bool amsgrad = false;                  // torch_adam
  bool decoupled = false;                // torch_adam: decays the weight itself, as AdamW does
  bool centered = false;                 // torch_rmsprop
  bool maximize = false;                 // torch_*
  double clip_gradient = -1;             // negative: none. Applied after rescaling, as MXNet does.
  double clip_weights = -1;              // rmsprop, centered; negative: none
  bool multi_precision = false;          // weights of half precision keep a float32 master copy
};

// What travels with each push, because a schedule or the user may change it between rounds.
// All workers of a round must send the same.
struct RoundScalars {
  double lr = 0;        // effective: the worker has applied lr_mult and, where the algorithm has one, a bias correction
  double wd = 0;        // effective: wd_mult applied
  double rescale = 1;   // multiplies the summed gradient
  double updates = 0;   // ftml, nadam, torch_*: how many updates this parameter has had, this one included
  double schedule = 1;  // nadam: the running product of the momenta, this update's included
};

class Optimizer {
 public:
  // Throws Error(kUsage) that names the field if a number is out of its range (negative epsilon, NaN, ...).
  static std::unique_ptr<const Optimizer> make(const OptimizerSpec& spec);
  virtual ~Optimizer() = default;

  // State arrays per slice (momentum, mean, ...), each of `elements` values of sum_type(weight type), in the framework's
  // order.
  virtual int state_count() const = 0;

  // Fills the state arrays before the first update of `weight` (weight_type): zeros, or DCASGD's previous weight,
  // or what PyTorch's AdaGrad begins with.
  void start_state(DType weight_type, const void* weight, void* const* state, size_t elements) const;

  // Whether slices of this type also keep a float32 master of the weight (initialised from it).
  bool needs_master(DType weight_type) const { return spec_.multi_precision && is_half(weight_type); }

  // One update of `weight` (weight_type) by the sum of gradients `gradient` (sum_type(weight_type); only read).
  // `master` is null unless needs_master(). `state` points at state_count() arrays. No two arrays may overlap.
  // Every pointer is aligned to its element. Nothing is allocated. Throws Error(kUsage) if weight_type is not floating.
  void update(DType weight_type, void* weight, void* master, void* const* state, const void* gradient, size_t elements,
              const RoundScalars& round) const;

  const OptimizerSpec& spec() const { return spec_; }

 protected:
  explicit Optimizer(const OptimizerSpec& spec) : spec_(spec) {}

  // One overload per type that the arithmetic runs in.
  virtual void step(float* weight, float* const* state, const float* gradient, size_t n,
                    const RoundScalars& round) const = 0;
  virtual void step(double* weight, double* const* state, const double* gradient, size_t n,
                    const RoundScalars& round) const = 0;

 private:
  OptimizerSpec spec_;
};

}  // namespace p3
