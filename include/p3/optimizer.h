// The optimizers that run on the server, on one slice at a time.
//
// Which there are, their arithmetic and what they need are the rules of src/rules: p3/rule.h. All of them are
// element-wise: a slice needs nothing from its neighbours.
// Threads: an Optimizer is immutable after make(); update() may run on many slices at once.
#pragma once

#include <cstddef>
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

// The values of a rule's fields in one round, those of a description, in the order of Rule::fields(): flags are 0 or 1.
// Shared by all that a round makes of them. Null: those that were announced.
using FieldValues = std::vector<double>;
using SharedFields = std::shared_ptr<const FieldValues>;
constexpr size_t kMostFields = 16;
bool are_same(const SharedFields& one, const SharedFields& other);

// What the optimizer goes by in one round; all workers of the round must have the same.
struct RoundSettings {
  RoundSettings() = default;
  RoundSettings(const RoundScalars& its, SharedFields given = {}) : scalars(its), fields(std::move(given)) {}

  RoundScalars scalars{};
  SharedFields fields{};
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
  // The same with other values of its fields. It has this one's states, though it may update fewer of them. Throws
  // Error(kUsage), which names the field, if one is out of its range, or asks for a state that this one does not have.
  std::unique_ptr<const Optimizer> with(const FieldValues& values) const;
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
  // `master` is null unless needs_master(). `state` points at state_count() arrays; of what with() has made, at those of
  // the optimizer that it was asked of. No two arrays may overlap.
  // Every pointer is aligned to its element. Nothing is allocated. Throws Error(kUsage) if weight_type is not floating.
  void update(DType weight_type, void* weight, void* master, void* const* state, const void* gradient, size_t elements,
              const RoundScalars& round) const;

  // As it was made.
  const OptimizerSpec& spec() const { return spec_; }
  FieldValues values() const;
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
  static std::unique_ptr<Optimizer> made(const OptimizerSpec& spec);
  size_t place_of(size_t state) const { return places_.empty() ? state : places_[state]; }

  const std::vector<State> states_;
  std::vector<size_t> places_;  // of these states among those that update() is given; empty: they are the same
  OptimizerSpec spec_;
  bool multi_precision_ = false;
};

}  // namespace p3
