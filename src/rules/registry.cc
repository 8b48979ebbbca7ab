// Every rule, and what is asked of all of them.

#include "p3/error.h"
#include "p3/rule.h"

namespace p3 {
namespace rules {

MakeOptimizer mxnet_sgd, mxnet_nag, mxnet_adam, mxnet_adagrad, mxnet_rmsprop, mxnet_rmsprop_centered, mxnet_signum,
    mxnet_ftml, mxnet_ftrl, mxnet_adadelta, mxnet_adamax, mxnet_nadam, mxnet_dcasgd, mxnet_test;
MakeOptimizer torch_sgd, torch_adam, torch_adagrad, torch_rmsprop;
MakeOptimizer lion, outer_sgd;

}  // namespace rules

const std::vector<Rule>& all_rules() {
  static const std::vector<Rule> all{
      {"sgd", rules::mxnet_sgd},
      {"nag", rules::mxnet_nag},
      {"adam", rules::mxnet_adam},
      {"adagrad", rules::mxnet_adagrad},
      {"rmsprop", rules::mxnet_rmsprop},
      {"rmsprop_centered", rules::mxnet_rmsprop_centered},
      {"signum", rules::mxnet_signum},
      {"ftml", rules::mxnet_ftml},
      {"ftrl", rules::mxnet_ftrl},
      {"adadelta", rules::mxnet_adadelta},
      {"adamax", rules::mxnet_adamax},
      {"nadam", rules::mxnet_nadam},
      {"dcasgd", rules::mxnet_dcasgd},
      {"test", rules::mxnet_test},
      {"torch_sgd", rules::torch_sgd},
      {"torch_adam", rules::torch_adam},
      {"torch_adagrad", rules::torch_adagrad},
      {"torch_rmsprop", rules::torch_rmsprop},
      {"lion", rules::lion},
      {"outer_sgd", rules::outer_sgd},
  };
  return all;
}

const Rule& rule_named(const std::string& name) {
  std::string known;
  for (const Rule& rule : all_rules()) {
    if (rule.name == name) return rule;
    known += (known.empty() ? "" : ", ") + std::string(rule.name);
  }
  throw Error(ErrorKind::kUsage, "optimizer: there is no '" + name + "'; there are " + known);
}

}  // namespace p3
