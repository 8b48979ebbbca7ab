// Runs one target over its corpus, and half of each of its inputs, with any compiler: what once failed stays mended.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "input.h"

TEST(Fuzz, P3_FUZZ_TARGET) {
  size_t inputs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(P3_FUZZ_CORPUS)) {
    SCOPED_TRACE(entry.path().string());
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    for (const size_t size : {bytes.size(), bytes.size() / 2}) {
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), size);
      ++inputs;
    }
  }
  EXPECT_GT(inputs, 0u) << "no corpus in " << P3_FUZZ_CORPUS;
}
