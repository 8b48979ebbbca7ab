// A rule: how the servers update a weight, by name.
//
// It is one file of src/rules, which says everything about it: its fields with their standard values and ranges, its
// states, and the update of one element. src/rules/registry.cc lists all of them; who updates, moves states or checks a
// description asks the rule. All rules have the field multi_precision (a float32 master copy of weights of half
// precision), and read of each round its learning rate, decay and rescaling, as far as they have a use for them.
//
// Threads: immutable values and pure functions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "p3/optimizer.h"

namespace p3 {

// A number of a rule that has a name.
struct Field {
  const char* name;
  double standard;  // of a description that leaves it out
  double least, most;
  const char* allowed;     // in words
  bool is_flag = false;    // 0 or 1
  bool per_round = false;  // none of the description, but one of RoundScalars that the rule reads
};

// Where a rule reads its fields, each by its name: so it declares them. Throws Error(kUsage), which names the field, if
// the description has a value out of its range.
class Fields {
 public:
  explicit Fields(const OptimizerSpec& spec) : spec_(spec) {}

  double at_least_0(const char* name, double standard);
  double fraction(const char* name, double standard);  // at least 0, below 1
  double finite(const char* name, double standard);
  double clipping(const char* name);  // negative, as it is where none is given: none
  bool flag(const char* name);        // false where none is given
  void per_round(const char* name);

  // Those read so far.
  const std::vector<Field>& read() const { return read_; }

 private:
  double value(const Field& field);

  const OptimizerSpec& spec_;
  std::vector<Field> read_;
};

// The numbers of a description, as a rule reads them, and what most rules need not say.
struct Hyperparameters {
  virtual ~Hyperparameters() = default;

  // Whether it is SGD with momentum alone, whose steps the workers can make and the servers take (codec/dgc.h).
  virtual bool is_plain_sgd() const { return false; }

  // With staleness only the servers count the updates, so workers push plain numbers, and what depends on the count
  // (`pushed.updates` has it) is worked out here. `schedule` is RoundScalars::schedule of the update before, and becomes
  // this one's; what the push has there is the rule's own to use.
  virtual RoundScalars counted(RoundScalars pushed, double& schedule) const {
    (void)schedule;
    return pushed;
  }
  // RoundScalars::schedule behind so many updates.
  virtual double schedule_behind(uint64_t updates) const {
    (void)updates;
    return 1;
  }

 protected:
  Hyperparameters() = default;
  Hyperparameters(const Hyperparameters&) = default;
  Hyperparameters& operator=(const Hyperparameters&) = default;
};

using MakeOptimizer = std::unique_ptr<Optimizer>(Fields& fields);

struct Rule {
  const char* name;  // as {"name": name}
  MakeOptimizer* make;

  std::vector<Field> fields() const;
};

// All of them.
const std::vector<Rule>& all_rules();
// Throws Error(kUsage) that names all.
const Rule& rule_named(const std::string& name);
// Of its description, in the order of FieldValues.
std::vector<std::string> field_names(const std::string& rule);

}  // namespace p3
