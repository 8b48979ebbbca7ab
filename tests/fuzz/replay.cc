// Runs one target over its corpus, and half of each of its inputs, with any compiler: what once failed stays mended.
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "input.h"

namespace {

std::vector<uint8_t> bytes_of(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

}  // namespace

TEST(Fuzz, P3_FUZZ_TARGET) {
  std::ifstream corpus(P3_FUZZ_CORPUS);
  std::string line;
  int number = 0;
  while (std::getline(corpus, line)) {
    SCOPED_TRACE(P3_FUZZ_CORPUS ":" + std::to_string(++number));
    const std::vector<uint8_t> bytes = bytes_of(line);
    for (const size_t size : {bytes.size(), bytes.size() / 2}) LLVMFuzzerTestOneInput(bytes.data(), size);
  }
  EXPECT_GT(number, 0) << "no corpus in " << P3_FUZZ_CORPUS;
}
