#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>

#include "p3/error.h"
#include "p3/rule.h"

namespace p3 {
namespace {

constexpr double kLargest = std::numeric_limits<double>::max();
constexpr double kBelow1 = 1 - std::numeric_limits<double>::epsilon() / 2;

Error error_of(const OptimizerSpec& spec, const std::string& what) {
  return {ErrorKind::kUsage, "optimizer " + spec.name + ": " + what};
}

const char* const kMultiPrecision = "multi_precision";

// "momentum 0.9, nesterov 1": what the second has otherwise than the first.
std::string changed(const OptimizerSpec& from, const OptimizerSpec& to) {
  std::ostringstream text;
  for (const Field& field : rule_named(to.name).fields()) {
    if (field.per_round) continue;
    const auto before = from.fields.find(field.name);
    const double value = to.fields.at(field.name);
    if (value == (before == from.fields.end() ? field.standard : before->second)) continue;
    text << (text.tellp() > 0 ? ", " : "") << field.name << ' ' << value;
  }
  return text.str();
}

}  // namespace

double Fields::at_least_0(const char* name, double standard) {
  return value({name, standard, 0, kLargest, "a finite number of at least 0"});
}

double Fields::fraction(const char* name, double standard) {
  return value({name, standard, 0, kBelow1, "a number of at least 0 and below 1"});
}

double Fields::finite(const char* name, double standard) {
  return value({name, standard, -kLargest, kLargest, "a finite number"});
}

double Fields::clipping(const char* name) {
  return value({name, -1, -kLargest, kLargest, "a finite number (negative: no clipping)"});
}

bool Fields::flag(const char* name) { return value({name, 0, 0, 1, "True or False", /*is_flag=*/true}) != 0; }

void Fields::per_round(const char* name) {
  read_.push_back({name, 0, -kLargest, kLargest, "a finite number", /*is_flag=*/false, /*per_round=*/true});
}

double Fields::value(const Field& field) {
  read_.push_back(field);
  const auto given = spec_.fields.find(field.name);
  if (given == spec_.fields.end()) return field.standard;
  const double value = given->second;
  if (value >= field.least && value <= field.most) return value;  // which NaN is not
  std::ostringstream text;
  text << field.name << " is " << value << "; it must be " << field.allowed;
  throw error_of(spec_, text.str());
}

std::vector<Field> Rule::fields() const {
  const OptimizerSpec none{name, {}};
  Fields fields(none);
  make(fields);
  fields.flag(kMultiPrecision);
  return fields.read();
}

std::vector<std::string> field_names(const std::string& rule) {
  std::vector<std::string> names;
  for (const Field& field : rule_named(rule).fields())
    if (!field.per_round) names.push_back(field.name);
  return names;
}

std::unique_ptr<const Optimizer> Optimizer::make(const OptimizerSpec& spec) { return made(spec); }

std::unique_ptr<Optimizer> Optimizer::made(const OptimizerSpec& spec) {
  Fields fields(spec);
  auto optimizer = rule_named(spec.name).make(fields);
  optimizer->multi_precision_ = fields.flag(kMultiPrecision);
  optimizer->spec_ = spec;
  for (const auto& given : spec.fields) {
    const auto& read = fields.read();
    const auto is_it = [&](const Field& field) { return !field.per_round && field.name == given.first; };
    if (std::none_of(read.begin(), read.end(), is_it)) throw error_of(spec, "it has no field " + given.first);
  }
  return optimizer;
}

std::unique_ptr<const Optimizer> Optimizer::with(const FieldValues& values) const {
  const std::vector<std::string> names = field_names(spec_.name);
  if (values.size() != names.size())
    throw error_of(spec_,
                   std::to_string(values.size()) + " values for its " + std::to_string(names.size()) + " fields");
  OptimizerSpec spec{spec_.name, {}};
  for (size_t i = 0; i < names.size(); ++i) spec.fields[names[i]] = values[i];
  auto optimizer = made(spec);
  const auto place_of_state = [this](const State& state) {
    const auto is_it = [&](const State& mine) { return std::strcmp(mine.name, state.name) == 0; };
    return static_cast<size_t>(std::find_if(states_.begin(), states_.end(), is_it) - states_.begin());
  };
  for (const State& state : optimizer->states_) {
    optimizer->places_.push_back(place_of_state(state));
    if (optimizer->places_.back() == states_.size())
      throw error_of(spec_, std::string("it began without ") + state.name + ", and " + changed(spec_, spec) +
                                " would need that: give it such values before its first update");
  }
  if (optimizer->multi_precision_ != multi_precision_)
    throw error_of(spec_, std::string(kMultiPrecision) + " cannot change between updates");
  return optimizer;
}

FieldValues Optimizer::values() const {
  FieldValues values;
  for (const Field& field : rule_named(spec_.name).fields()) {
    if (field.per_round) continue;
    const auto given = spec_.fields.find(field.name);
    values.push_back(given == spec_.fields.end() ? field.standard : given->second);
  }
  return values;
}

bool are_same(const SharedFields& one, const SharedFields& other) {
  return one == other || (one != nullptr && other != nullptr && *one == *other);
}

}  // namespace p3
