#include <algorithm>
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

std::unique_ptr<const Optimizer> Optimizer::make(const OptimizerSpec& spec) {
  Fields fields(spec);
  auto optimizer = rule_named(spec.name).make(fields);
  optimizer->multi_precision_ = fields.flag(kMultiPrecision);
  for (const auto& given : spec.fields) {
    const auto& read = fields.read();
    const auto is_it = [&](const Field& field) { return !field.per_round && field.name == given.first; };
    if (std::none_of(read.begin(), read.end(), is_it)) throw error_of(spec, "it has no field " + given.first);
  }
  return optimizer;
}

}  // namespace p3
