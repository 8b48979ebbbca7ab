// The arithmetic is compared with MXNet's in tests/mxnet/test_optimizers.py and with PyTorch's in
// tests/torch/test_arithmetic.py; here, what the core must hold without Python.
#include "p3/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "base/simd.h"
#include "p3/error.h"
#include "p3/rule.h"

namespace p3 {
namespace {

using Numbers = std::map<std::string, double>;

// All of a rule's standard values but these, and with its flags set or not.
OptimizerSpec spec_of(const Rule& rule, double momentum, bool flags) {
  OptimizerSpec spec{rule.name, {}};
  for (const Field& field : rule.fields()) {
    if (field.per_round || std::string(field.name) == "multi_precision") continue;
    if (field.is_flag) spec.fields[field.name] = flags;
    if (std::string(field.name) == "momentum") spec.fields[field.name] = momentum;
    if (std::string(field.name) == "dampening") spec.fields[field.name] = 0.1;
  }
  return spec;
}

std::vector<OptimizerSpec> all_specs() {
  std::vector<OptimizerSpec> specs;
  for (const Rule& rule : all_rules())
    for (const double momentum : {0.0, 0.9})
      for (const bool flags : {false, true}) specs.push_back(spec_of(rule, momentum, flags));
  return specs;
}

int states_of(const char* name, const Numbers& numbers = {}) {
  return Optimizer::make(OptimizerSpec{name, numbers})->state_count();
}

// Several updates of random weights by random gradients; the weights, then the states.
template <typename T>
std::vector<T> train(const Optimizer& optimizer, DType type, size_t n, size_t piece) {
  std::mt19937 random(3);
  std::uniform_real_distribution<T> uniform(-1, 1);
  std::vector<T> weight(n), gradient(n);
  for (T& value : weight) value = uniform(random);
  std::vector<std::vector<T>> states(static_cast<size_t>(optimizer.state_count()), std::vector<T>(n));
  std::vector<void*> whole;
  for (auto& state : states) whole.push_back(state.data());
  optimizer.start_state(type, weight.data(), whole.data(), n);
  const RoundScalars round{0.1, 0.01, 0.7, 3, 0.2};
  for (int step = 0; step < 5; ++step) {
    for (T& value : gradient) value = uniform(random);
    for (size_t begin = 0; begin < n; begin += piece) {
      std::vector<void*> pointers;
      for (auto& state : states) pointers.push_back(state.data() + begin);
      optimizer.update(type, weight.data() + begin, nullptr, pointers.data(), gradient.data() + begin,
                       std::min(piece, n - begin), round);
    }
  }
  for (const auto& state : states) weight.insert(weight.end(), state.begin(), state.end());
  return weight;
}

TEST(Optimizer, PiecesAndBothBuildsOfTheLoopGiveTheSameBits) {
  for (const OptimizerSpec& spec : all_specs()) {
    const auto optimizer = Optimizer::make(spec);
    const auto floats = train<float>(*optimizer, DType::kFloat32, 1003, 1003);
    const auto doubles = train<double>(*optimizer, DType::kFloat64, 1003, 1003);
    const bool before = use_avx2.exchange(false);
    EXPECT_EQ(floats, train<float>(*optimizer, DType::kFloat32, 1003, 7)) << spec.name;
    EXPECT_EQ(doubles, train<double>(*optimizer, DType::kFloat64, 1003, 7)) << spec.name;
    use_avx2 = before;
  }
}

// GCC 12 at -O3 once dropped this rounding of neighbouring numbers.
TEST(Optimizer, NumbersOfMxnetsOperatorsAreFloatsInDoubleArithmeticToo) {
  const auto optimizer = Optimizer::make({"adam", {{"beta1", 0}}});
  double weight = 0, gradient = 1, mean = 0, variance = 0;
  void* states[] = {&mean, &variance};
  optimizer->update(DType::kFloat64, &weight, nullptr, states, &gradient, 1, {0.1, 0.01, 0.7});
  EXPECT_EQ(mean, static_cast<double>(0.7f));
}

TEST(Optimizer, StatesPerRule) {
  for (const char* name : {"sgd", "nag", "signum", "dcasgd", "torch_sgd", "torch_rmsprop"})
    EXPECT_EQ(states_of(name, {{"momentum", 0.9}}), states_of(name, {{"momentum", 0}}) + 1) << name;
  for (const char* name : {"sgd", "nag", "torch_sgd"}) EXPECT_EQ(states_of(name), 0) << name;
  for (const char* name : {"test", "adagrad", "rmsprop", "torch_adagrad"}) EXPECT_EQ(states_of(name), 1) << name;
  for (const char* name : {"adam", "ftrl", "adadelta", "adamax", "nadam", "torch_adam"})
    EXPECT_EQ(states_of(name), 2) << name;
  for (const char* name : {"rmsprop_centered", "ftml"}) EXPECT_EQ(states_of(name), 3) << name;
  EXPECT_EQ(states_of("torch_adam", {{"amsgrad", 1}}), 3);
  EXPECT_EQ(states_of("torch_rmsprop", {{"centered", 1}, {"momentum", 0.9}}), 3);
  EXPECT_EQ(states_of("torch_rmsprop", {{"centered", 1}}), 2);
}

TEST(Optimizer, StatesStartAtZeroAndDcasgdsPreviousWeightAsTheWeight) {
  const std::vector<half> weight(5, float_to_half(1.5f));
  for (const OptimizerSpec& spec : all_specs()) {
    const auto optimizer = Optimizer::make(spec);
    std::vector<std::vector<float>> states(static_cast<size_t>(optimizer->state_count()), std::vector<float>(5, -7));
    std::vector<void*> pointers;
    for (auto& state : states) pointers.push_back(state.data());
    optimizer->start_state(DType::kFloat16, weight.data(), pointers.data(), weight.size());
    for (const auto& state : states) {
      const bool previous = spec.name == "dcasgd" && &state == &states.back();
      EXPECT_EQ(state, std::vector<float>(5, previous ? 1.5f : 0.0f)) << spec.name;
    }
    optimizer->start_state(DType::kFloat16, nullptr, std::vector<void*>(states.size()).data(), 0);
  }
}

// In steps that the type cannot make near 1.
template <typename T>
void expect_no_small_step_lost(DType type, T (*narrow)(float), float step_size) {
  const auto precise = Optimizer::make({"sgd", {{"multi_precision", 1}}});
  EXPECT_TRUE(precise->needs_master(type));
  EXPECT_FALSE(precise->needs_master(DType::kFloat32));
  std::vector<T> weight(2500, narrow(1)), rounded = weight;  // more elements than a block
  std::vector<float> master(weight.size(), 1.0f), gradient(weight.size(), -step_size);
  const auto coarse = Optimizer::make({"sgd", {}});
  EXPECT_FALSE(coarse->needs_master(type));
  for (int step = 0; step < 16; ++step) {
    precise->update(type, weight.data(), master.data(), nullptr, gradient.data(), weight.size(), {1, 0, 1});
    coarse->update(type, rounded.data(), nullptr, nullptr, gradient.data(), weight.size(), {1, 0, 1});
  }
  EXPECT_EQ(weight, std::vector<T>(weight.size(), narrow(1 + 16 * step_size)));
  EXPECT_EQ(master, std::vector<float>(weight.size(), 1 + 16 * step_size));
  EXPECT_EQ(rounded, std::vector<T>(weight.size(), narrow(1)));
}

template <typename T>
void expect_torchs_adagrad_to_start_at(double value, DType type) {
  const OptimizerSpec spec{"torch_adagrad", {{"initial_accumulator_value", value}}};
  std::vector<T> sums(3, -7);
  void* state = sums.data();
  Optimizer::make(spec)->start_state(type, nullptr, &state, sums.size());
  EXPECT_EQ(sums, std::vector<T>(3, static_cast<T>(value))) << name_of(type);
}

TEST(Optimizer, TorchsAdaGradStartsAtItsInitialValue) {
  for (DType type : {DType::kFloat32, DType::kFloat16, DType::kBfloat16})
    expect_torchs_adagrad_to_start_at<float>(0.1, type);
  expect_torchs_adagrad_to_start_at<double>(0.1, DType::kFloat64);
}

TEST(Optimizer, TorchsFirstVelocityIsTheGradientItself) {
  const auto optimizer = Optimizer::make({"torch_sgd", {{"momentum", 0.5}, {"dampening", 0.1}}});
  float weight = 1, gradient = 2, velocity = 0;
  void* state = &velocity;
  RoundScalars round;
  round.lr = 0.25;
  for (const float expected : {2.0f, 0.5f * 2 + 0.9f * 2}) {  // a dampening of 0.1 from the second on
    ++round.updates;
    optimizer->update(DType::kFloat32, &weight, nullptr, &state, &gradient, 1, round);
    EXPECT_FLOAT_EQ(velocity, expected);
  }
}

TEST(Optimizer, HalvesWithAMasterLoseNoSmallSteps) {
  expect_no_small_step_lost(DType::kFloat16, float_to_half, 0x1p-13f);
  expect_no_small_step_lost(DType::kBfloat16, float_to_bfloat16, 0x1p-10f);
}

TEST(Optimizer, WithItsOwnValuesIsTheSame) {
  for (const OptimizerSpec& spec : all_specs()) {
    const auto optimizer = Optimizer::make(spec);
    EXPECT_LE(optimizer->values().size(), kMostFields);
    const auto same = optimizer->with(optimizer->values());
    EXPECT_EQ(train<double>(*optimizer, DType::kFloat64, 9, 9), train<double>(*same, DType::kFloat64, 9, 9))
        << spec.name;
  }
}

TEST(Optimizer, WithOtherValuesUpdatesAsOneThatWasMadeSo) {
  const OptimizerSpec before{"torch_adam", {{"beta1", 0.9}, {"beta2", 0.99}}};
  const OptimizerSpec after{"torch_adam", {{"beta1", 0.8}, {"beta2", 0.99}, {"maximize", 1}}};
  const auto live = Optimizer::make(before)->with(Optimizer::make(after)->values());
  const auto expected = train<float>(*Optimizer::make(after), DType::kFloat32, 9, 9);
  EXPECT_EQ(train<float>(*live, DType::kFloat32, 9, 9), expected);
  EXPECT_NE(train<float>(*Optimizer::make(before), DType::kFloat32, 9, 9), expected);
}

// As in PyTorch, where such a state stays as it is until the flag is set again.
TEST(Optimizer, WithoutAStateThatItHadLeavesThatAloneAndFindsTheOthers) {
  const Numbers all{{"momentum", 0.5}, {"centered", 1}, {"alpha", 0.5}};
  const auto optimizer = Optimizer::make({"torch_rmsprop", all});
  float weight = 1, gradient = 2, square = 3, velocity = 4, mean = 1;
  void* states[] = {&square, &velocity, &mean};
  RoundScalars round;
  round.lr = 0.5;
  const auto centered =
      optimizer->with(Optimizer::make({"torch_rmsprop", {{"centered", 1}, {"alpha", 0.5}}})->values());
  centered->update(DType::kFloat32, &weight, nullptr, states, &gradient, 1, round);
  EXPECT_EQ(square, 3.5f);
  EXPECT_EQ(velocity, 4.0f);
  EXPECT_EQ(mean, 1.5f);
  const auto moving =
      optimizer->with(Optimizer::make({"torch_rmsprop", {{"momentum", 0.5}, {"alpha", 0.5}}})->values());
  moving->update(DType::kFloat32, &weight, nullptr, states, &gradient, 1, round);
  EXPECT_EQ(square, 3.75f);
  EXPECT_FLOAT_EQ(velocity, 2 + 2 / std::sqrt(3.75f));
  EXPECT_EQ(mean, 1.5f);
}

TEST(Optimizer, CannotHaveValuesThatNeedAnotherStateOrAreNone) {
  const auto refusal = [](const OptimizerSpec& before, const FieldValues& values) -> std::string {
    try {
      Optimizer::make(before)->with(values);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      return error.what();
    }
    return "";
  };
  const auto values = [](const OptimizerSpec& spec) { return Optimizer::make(spec)->values(); };
  EXPECT_EQ(refusal({"torch_adam", {}}, values({"torch_adam", {{"amsgrad", 1}}})),
            "optimizer torch_adam: it began without max_exp_avg_sq, and amsgrad 1 would need that: give it such values "
            "before its first update");
  EXPECT_NE(refusal({"torch_sgd", {}}, values({"torch_sgd", {{"momentum", 0.5}}})).find("momentum 0.5"),
            std::string::npos);
  EXPECT_EQ(refusal({"lion", {}}, {0.9}), "optimizer lion: 1 values for its 3 fields");
  EXPECT_EQ(refusal({"lion", {}}, {0.9, 2, 0}),
            "optimizer lion: beta2 is 2; it must be a number of at least 0 and below 1");
  EXPECT_NE(refusal({"lion", {}}, {0.9, 0.5, 1}).find("multi_precision cannot change"), std::string::npos);
}

TEST(Optimizer, IntegerWeightsAreRefused) {
  const auto optimizer = Optimizer::make({"sgd", {}});
  int32_t weight = 1, gradient = 1;
  try {
    optimizer->update(DType::kInt32, &weight, nullptr, nullptr, &gradient, 1, {});
    FAIL() << "int32 weights were accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("int32"), std::string::npos) << error.what();
  }
}

std::string refusal_of(const OptimizerSpec& spec) {
  try {
    Optimizer::make(spec);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
  return "";
}

TEST(Optimizer, NumbersOutOfTheirRangeAreRefusedAndTheFieldNamed) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (const Rule& rule : all_rules())
    for (const Field& field : rule.fields()) {
      if (field.per_round) continue;
      EXPECT_EQ(refusal_of({rule.name, {{field.name, field.standard}}}), "");
      for (const double value :
           {nan, infinity, -infinity, std::nextafter(field.least, -infinity), std::nextafter(field.most, infinity)})
        EXPECT_NE(refusal_of({rule.name, {{field.name, value}}}).find(std::string(field.name) + " is "),
                  std::string::npos)
            << rule.name << ' ' << field.name << ' ' << value;
    }
  EXPECT_EQ(refusal_of({"adam", {{"beta1", 1}}}),
            "optimizer adam: beta1 is 1; it must be a number of at least 0 and below 1");
  EXPECT_EQ(refusal_of({"adam", {{"epsilon", -1}}}),
            "optimizer adam: epsilon is -1; it must be a finite number of at least 0");
}

TEST(Optimizer, UnknownNamesAreRefused) {
  EXPECT_NE(refusal_of({"lars", {}}).find("optimizer: there is no 'lars'; there are sgd, nag, "), std::string::npos);
  EXPECT_EQ(refusal_of({"sgd", {{"beta1", 0}}}), "optimizer sgd: it has no field beta1");
  EXPECT_EQ(refusal_of({"nadam", {{"updates", 0}}}), "optimizer nadam: it has no field updates");
}

}  // namespace
}  // namespace p3
