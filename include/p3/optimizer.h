// The optimizers that run on the server, on one slice at a time.
//
// Which there are, their arithmetic and what they need are the rules of src/rules: p3/rule.h. All of them are
// element-wise: a slice needs nothing from its neighbours.
// Threads: an Optimizer is immutable after make(); update() may run on many slices at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "p3/dtype.h"

namespace p3 {

struct Hyperparameters;

// What set_optimizer announces, once: the name of a rule and numbers, never code.
struct OptimizerSpec {
  std::string name;
  std::map<std::string, double> fields;  // those left out have the rule's standard values; flags are 0 or 1
};

// What travels with each push, because a schedule or the user may change it between rounds.
// All workers of a round must send the same.
struct RoundScalars {
  double lr = 0;        // effective: the worker has applied lr_mult and, where the rule has one, a bias correction
  double wd = 0;        // effective: wd_mult applied
  double rescale = 1;   // multiplies the summed gradient
  double updates = 0;   // of rules that read it: how many updates this parameter has had, this one included
  double schedule = 1;  // nadam: the running product of the momenta, this update's included
};

class Optimizer {
 public:
  // An array beside the weight: momentum, mean ...
  struct State {
    const char* name;
    double initial = 0;
    bool is_weight = false;  // it starts as a copy of the weight instead
  };
  static constexpr int kMostStates = 3;

  // Throws Error(kUsage) that names the rule or the field if there is none of that name, or if a number is out of its
  // range (negative epsilon, NaN, ...).
  static std::unique_ptr<const Optimizer> make(const OptimizerSpec& spec);
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Per slice, in the framework's order: each of `elements` values of sum_type(weight type).
  const std::vector<State>& states() const { return states_; }
  int state_count() const { return static_cast<int>(states_.size()); }

  // Fills the state arrays before the first update of `weight` (weight_type).
  void start_state(DType weight_type, const void* weight, void* const* state, size_t elements) const;

  // Whether slices of this type also keep a float32 master of the weight (initialised from it).
  bool needs_master(DType weight_type) const { return multi_precision_ && is_half(weight_type); }

  // One update of `weight` (weight_type) by the sum of gradients `gradient` (sum_type(weight_type); only read).
  // `master` is null unless needs_master(). `state` points at state_count() arrays. No two arrays may overlap.
  // Every pointer is aligned to its element. Nothing is allocated. Throws Error(kUsage) if weight_type is not floating.
  void update(DType weight_type, void* weight, void* master, void* const* state, const void* gradient, size_t elements,
              const RoundScalars& round) const;

  // What else the rule says of itself: p3/rule.h.
  virtual const Hyperparameters& rule() const = 0;

 protected:
  explicit Optimizer(std::vector<State> states) : states_(std::move(states)) {}

  // One overload per type that the arithmetic runs in.
  virtual void step(float* weight, float* const* state, const float* gradient, size_t n,
                    const RoundScalars& round) const = 0;
  virtual void step(double* weight, double* const* state, const double* gradient, size_t n,
                    const RoundScalars& round) const = 0;

 private:
  const std::vector<State> states_;
  bool multi_precision_ = false;
};

}  // namespace p3
