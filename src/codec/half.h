// A codec that rounds each element to a type of half the size, to nearest even, and leaves nothing out.
#pragma once

#include "numeric/sum.h"
#include "p3/codec.h"

namespace p3 {

class HalfCodec final : public Codec {
 public:
  HalfCodec(Encoding its_encoding, const char* its_name, const char* its_effect, DType type)
      : Codec(its_encoding, its_name, its_effect), type_(type) {}

  bool carries_sums() const override { return true; }
  size_t bytes(const Options&, size_t n) const override { return n * size_of(type_); }
  void encode(const Options&, const float* gradient, float*, void* payload, size_t n) const override {
    finish_sum(type_, payload, gradient, n);
  }
  void start_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    p3::start_sum(type_, accumulator, payload, n);
  }
  void add_to_sum(const Options&, float* accumulator, const void* payload, size_t n) const override {
    p3::add_to_sum(type_, accumulator, payload, n);
  }

 private:
  const DType type_;
};

}  // namespace p3
