// The arithmetic is compared with MXNet's in tests/mxnet/test_optimizers.py and with PyTorch's in
// tests/torch/test_arithmetic.py; here, what the core must hold without Python.
#include "p3/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "base/simd.h"
#include "p3/error.h"

namespace p3 {
namespace {

OptimizerSpec spec_of(Algorithm algorithm, double momentum = 0.9) {
  OptimizerSpec spec;
  spec.algorithm = algorithm;
  spec.momentum = momentum;
  spec.beta1 = 0.9;
  spec.beta2 = 0.999;
  spec.gamma1 = 0.9;
  spec.gamma2 = 0.9;
  spec.rho = 0.9;
  spec.beta = 1;
  spec.lamda1 = 0.01;
  spec.lamda = 0.04;
  spec.wd_lh = 0.01;
  spec.schedule_decay = 0.004;
  spec.dampening = 0.1;
  spec.alpha = 0.99;
  spec.epsilon = 1e-8;
  return spec;
}

OptimizerSpec all_of_torchs(Algorithm algorithm, double momentum = 0.9) {
  OptimizerSpec spec = spec_of(algorithm, momentum);
  spec.nesterov = spec.amsgrad = spec.decoupled = spec.centered = spec.maximize = true;
  return spec;
}

const Algorithm kAll[] = {Algorithm::kSgd,       Algorithm::kNag,          Algorithm::kAdam,
                          Algorithm::kAdaGrad,   Algorithm::kRmsProp,      Algorithm::kRmsPropCentered,
                          Algorithm::kSignum,    Algorithm::kFtml,         Algorithm::kFtrl,
                          Algorithm::kAdaDelta,  Algorithm::kAdamax,       Algorithm::kNadam,
                          Algorithm::kDcAsgd,    Algorithm::kTest,         Algorithm::kTorchSgd,
                          Algorithm::kTorchAdam, Algorithm::kTorchAdaGrad, Algorithm::kTorchRmsProp};

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
  for (Algorithm algorithm : kAll)
    for (const auto& spec :
         {spec_of(algorithm, 0), spec_of(algorithm), all_of_torchs(algorithm, 0), all_of_torchs(algorithm)}) {
      const auto optimizer = Optimizer::make(spec);
      const auto floats = train<float>(*optimizer, DType::kFloat32, 1003, 1003);
      const auto doubles = train<double>(*optimizer, DType::kFloat64, 1003, 1003);
      const bool before = use_avx2.exchange(false);
      EXPECT_EQ(floats, train<float>(*optimizer, DType::kFloat32, 1003, 7)) << static_cast<int>(algorithm);
      EXPECT_EQ(doubles, train<double>(*optimizer, DType::kFloat64, 1003, 7)) << static_cast<int>(algorithm);
      use_avx2 = before;
    }
}

// GCC 12 at -O3 once dropped this rounding of neighbouring numbers.
TEST(Optimizer, NumbersOfMxnetsOperatorsAreFloatsInDoubleArithmeticToo) {
  OptimizerSpec spec = spec_of(Algorithm::kAdam);
  spec.beta1 = 0;
  const auto optimizer = Optimizer::make(spec);
  double weight = 0, gradient = 1, mean = 0, variance = 0;
  void* states[] = {&mean, &variance};
  optimizer->update(DType::kFloat64, &weight, nullptr, states, &gradient, 1, {0.1, 0.01, 0.7});
  EXPECT_EQ(mean, static_cast<double>(0.7f));
}

TEST(Optimizer, StatesPerAlgorithm) {
  const int expected[] = {1, 1, 2, 1, 1, 3, 1, 3, 2, 2, 2, 2, 2, 1, 1, 2, 1, 2};
  for (Algorithm algorithm : kAll)
    EXPECT_EQ(Optimizer::make(spec_of(algorithm))->state_count(), expected[static_cast<int>(algorithm)]);
  EXPECT_EQ(Optimizer::make(spec_of(Algorithm::kSgd, 0))->state_count(), 0);
  EXPECT_EQ(Optimizer::make(spec_of(Algorithm::kNag, 0))->state_count(), 0);
  EXPECT_EQ(Optimizer::make(spec_of(Algorithm::kSignum, 0))->state_count(), 0);
  EXPECT_EQ(Optimizer::make(spec_of(Algorithm::kDcAsgd, 0))->state_count(), 1);
  EXPECT_EQ(Optimizer::make(spec_of(Algorithm::kTorchSgd, 0))->state_count(), 0);
  EXPECT_EQ(Optimizer::make(spec_of(Algorithm::kTorchRmsProp, 0))->state_count(), 1);
  EXPECT_EQ(Optimizer::make(all_of_torchs(Algorithm::kTorchAdam))->state_count(), 3);
  EXPECT_EQ(Optimizer::make(all_of_torchs(Algorithm::kTorchRmsProp))->state_count(), 3);
  EXPECT_EQ(Optimizer::make(all_of_torchs(Algorithm::kTorchRmsProp, 0))->state_count(), 2);
}

TEST(Optimizer, StatesStartAtZeroAndDcasgdsPreviousWeightAsTheWeight) {
  const std::vector<half> weight(5, float_to_half(1.5f));
  for (Algorithm algorithm : kAll) {
    const auto optimizer = Optimizer::make(spec_of(algorithm));
    std::vector<std::vector<float>> states(static_cast<size_t>(optimizer->state_count()), std::vector<float>(5, -7));
    std::vector<void*> pointers;
    for (auto& state : states) pointers.push_back(state.data());
    optimizer->start_state(DType::kFloat16, weight.data(), pointers.data(), weight.size());
    for (const auto& state : states) {
      const bool previous = algorithm == Algorithm::kDcAsgd && &state == &states.back();
      EXPECT_EQ(state, std::vector<float>(5, previous ? 1.5f : 0.0f)) << static_cast<int>(algorithm);
    }
    optimizer->start_state(DType::kFloat16, nullptr, std::vector<void*>(states.size()).data(), 0);
  }
}

// In steps that the type cannot make near 1.
template <typename T>
void expect_no_small_step_lost(DType type, T (*narrow)(float), float step_size) {
  OptimizerSpec spec = spec_of(Algorithm::kSgd, 0);
  spec.multi_precision = true;
  const auto precise = Optimizer::make(spec);
  EXPECT_TRUE(precise->needs_master(type));
  EXPECT_FALSE(precise->needs_master(DType::kFloat32));
  std::vector<T> weight(2500, narrow(1)), rounded = weight;  // more elements than a block
  std::vector<float> master(weight.size(), 1.0f), gradient(weight.size(), -step_size);
  const auto coarse = Optimizer::make(spec_of(Algorithm::kSgd, 0));
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
  OptimizerSpec spec = spec_of(Algorithm::kTorchAdaGrad);
  spec.initial_accumulator_value = value;
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
  const auto optimizer = Optimizer::make(spec_of(Algorithm::kTorchSgd, 0.5));
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

TEST(Optimizer, IntegerWeightsAreRefused) {
  const auto optimizer = Optimizer::make(spec_of(Algorithm::kSgd, 0));
  int32_t weight = 1, gradient = 1;
  try {
    optimizer->update(DType::kInt32, &weight, nullptr, nullptr, &gradient, 1, {});
    FAIL() << "int32 weights were accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("int32"), std::string::npos) << error.what();
  }
}

TEST(Optimizer, NonsenseIsRefusedAndTheFieldNamed) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  const struct {
    const char* field;
    double OptimizerSpec::* number;
    std::vector<double> bad;
  } cases[] = {{"momentum", &OptimizerSpec::momentum, {nan, -0.1, infinity}},
               {"beta1", &OptimizerSpec::beta1, {nan, -0.1, 1.0}},
               {"beta2", &OptimizerSpec::beta2, {nan, -0.1, 1.0}},
               {"epsilon", &OptimizerSpec::epsilon, {nan, -1e-8, infinity}},
               {"gamma1", &OptimizerSpec::gamma1, {nan, -0.1, 1.0}},
               {"gamma2", &OptimizerSpec::gamma2, {nan, -0.1, infinity}},
               {"rho", &OptimizerSpec::rho, {nan, -0.1, 1.0}},
               {"beta", &OptimizerSpec::beta, {nan, -0.1, infinity}},
               {"lamda1", &OptimizerSpec::lamda1, {nan, -0.1, infinity}},
               {"lamda", &OptimizerSpec::lamda, {nan, -0.1, infinity}},
               {"wd_lh", &OptimizerSpec::wd_lh, {nan, -0.1, infinity}},
               {"schedule_decay", &OptimizerSpec::schedule_decay, {nan, -0.1, infinity}},
               {"dampening", &OptimizerSpec::dampening, {nan, infinity}},
               {"alpha", &OptimizerSpec::alpha, {nan, -0.1, infinity}},
               {"initial_accumulator_value", &OptimizerSpec::initial_accumulator_value, {nan, -0.1, infinity}},
               {"clip_gradient", &OptimizerSpec::clip_gradient, {nan, infinity}},
               {"clip_weights", &OptimizerSpec::clip_weights, {nan, infinity}}};
  for (const auto& one : cases)
    for (double value : one.bad) {
      OptimizerSpec spec;
      spec.*one.number = value;
      try {
        Optimizer::make(spec);
        ADD_FAILURE() << one.field << " = " << value << " was accepted";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kUsage);
        EXPECT_NE(std::string(error.what()).find(one.field), std::string::npos) << error.what();
      }
    }
  OptimizerSpec unknown;
  unknown.algorithm = static_cast<Algorithm>(99);
  EXPECT_THROW(Optimizer::make(unknown), Error);
}

}  // namespace
}  // namespace p3
