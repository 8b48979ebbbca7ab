// Gradients in fewer bits, and what comes back of them: how a slice of float32 is written on the wire, and how it is summed
// from there.
//
// A codec is one file of src/codec, which says everything about it: its name and options, bytes, how a gradient is
// encoded, how it is added to a sum, and what it keeps of what it leaves out. src/codec/registry.cc lists all of them;
// who sends, sums, checks or counts asks the codec. Types other than float32 are always sent plain.
//
// Overflow: where the gradient of a slice, added to what is kept, is not finite everywhere, a codec that keeps something
// leaves that as it is and sends NaN. So every worker sees the overflow, and it is gone with the next gradient.
//
// Threads: codecs are immutable; functions are pure. Memory: the caller's; no two arrays may overlap.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "p3/dtype.h"
#include "p3/wire.h"

namespace p3 {

class Codec {
 public:
  // One that a script gives by name: {"type": "2bit", "threshold": 0.5}.
  struct Option {
    enum class Kind : uint8_t { kNumber, kWhole, kTruth };  // Python's float, int and bool

    const char* name;
    double standard;  // where the script gives none
    double least, most;
    bool is_above_least;  // the least one is not allowed itself
    const char* allowed;  // in words
    Kind kind = Kind::kNumber;
    // MXNet's own stores have it and its standard value; other front ends want it given.
    bool is_mxnets = false;
    bool allows(double value) const { return (is_above_least ? value > least : value >= least) && value <= most; }
  };
  // Their values, in the codec's order.
  static constexpr size_t kMostOptions = 4;
  using Options = std::array<double, kMostOptions>;

  Codec(Encoding its_encoding, const char* its_name, const char* its_effect, std::vector<Option> its_options = {})
      : encoding(its_encoding), name(its_name), effect(its_effect), options(std::move(its_options)) {}
  virtual ~Codec() = default;
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  const Encoding encoding;   // its number on the wire
  const char* const name;    // as {"type": name}
  const char* const effect;  // in words: what becomes of an element
  const std::vector<Option> options;

  // Of at most one dimension if `is_vector`; else the key stays plain.
  virtual bool is_for(DType type, bool is_vector) const {
    (void)is_vector;
    return type == DType::kFloat32;
  }
  // Floats that a worker keeps for each element.
  virtual size_t residuals() const { return 0; }
  // Whether a sum that the workers apply comes back in it, too, though nobody has asked for that.
  virtual bool carries_sums() const { return false; }
  // Whether workers send steps that the servers subtract, as codec/dgc.h has them, which encodes them.
  virtual bool makes_steps() const { return false; }
  // Whether it can encode what comes back from a server: a sum, or the change of a value.
  bool encodes_values() const { return !makes_steps(); }
  // How many neighbours RankSum adds up one after the other: what takes the bytes of about one sum.
  virtual size_t run() const { return 1; }

  // Of a payload of so many elements; 0 if a payload may have any size, of which can_have_bytes() says more.
  virtual size_t bytes(const Options& with, size_t elements) const = 0;
  virtual bool can_have_bytes(const Options& with, size_t elements, size_t payload_bytes) const {
    return payload_bytes == bytes(with, elements);
  }
  // How many elements a worker sends of so many, in that round of their key, counted from 1.
  virtual size_t sent(const Options& with, uint64_t round, size_t elements) const {
    (void)with, (void)round;
    return elements;
  }
  // Of a frame's payload with so many of the elements, whatever its encoding.
  virtual size_t bytes_with(const Options& with, size_t count, size_t elements) const {
    (void)count;
    return bytes(with, elements);
  }
  // What is wrong with the content of a payload that has come and can have its bytes, or null.
  virtual const char* problem_with(const Options& with, const void* payload, size_t payload_bytes,
                                   size_t elements) const {
    (void)with, (void)payload, (void)payload_bytes, (void)elements;
    return nullptr;
  }

  // `residual` is what earlier gradients left out: residuals() of each element.
  virtual void encode(const Options& with, const float* gradient, float* residual, void* payload,
                      size_t elements) const = 0;
  // accumulator = the decoded payload, and accumulator += the decoded payload, in float32.
  virtual void start_sum(const Options& with, float* accumulator, const void* payload, size_t elements) const = 0;
  virtual void add_to_sum(const Options& with, float* accumulator, const void* payload, size_t elements) const = 0;
};

// All of them, in the order of their numbers on the wire.
const std::vector<const Codec*>& codecs();
// Null: none, as for kPlain and kAbsent.
const Codec* codec_of(Encoding encoding);
// Throws Error(kUsage) that names all.
const Codec& codec_named(const std::string& name);

// How the gradients of a store, or of a key, or what comes back of them are encoded; the same on every node.
struct Compression {
  constexpr Compression() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): an encoding without options is one
  constexpr Compression(Encoding its_encoding, Codec::Options its_options = {})
      : encoding(its_encoding), options(its_options) {}
  constexpr Compression(Encoding its_encoding, double first) : encoding(its_encoding), options{first} {}

  Encoding encoding = Encoding::kPlain;  // any but kAbsent
  Codec::Options options{};              // of its codec

  bool operator==(const Compression& other) const { return encoding == other.encoding && options == other.options; }
  const Codec* codec() const { return codec_of(encoding); }
  // For what comes back of a slice of so many elements: none, unless it takes fewer bytes than they do.
  Compression if_shorter(size_t elements) const;
  // Of what is encoded so of a whole slice, in a round of its key that is behind any warm-up.
  size_t bytes(size_t elements) const;
  size_t residuals() const { return codec() == nullptr ? 0 : codec()->residuals(); }
  bool carries_sums() const { return codec() != nullptr && codec()->carries_sums(); }
  bool makes_steps() const { return codec() != nullptr && codec()->makes_steps(); }
  // The same, of a payload in that encoding: this one, or none.
  Compression in(Encoding its_encoding) const { return {its_encoding, options}; }
};

// Throws Error(kUsage) that says what is wrong with it.
void check(const Compression& compression);

// Bytes of a payload of so many elements of `type` (float32, unless the encoding is plain or absent); 0 where any size
// may be.
size_t encoded_bytes(const Compression& how, DType type, size_t elements);
// Whether a payload of so many elements can have so many bytes.
bool can_have_bytes(const Compression& how, DType type, size_t elements, size_t bytes);
// What is wrong with the content of a payload that has come and can have its bytes, or null.
const char* problem_with_encoded(const Compression& how, const void* payload, size_t bytes, size_t elements);

// As the codec does it, which is not null.
inline void encode(const Compression& how, const float* gradient, float* residual, void* payload, size_t elements) {
  how.codec()->encode(how.options, gradient, residual, payload, elements);
}
inline void start_encoded_sum(const Compression& how, float* accumulator, const void* payload, size_t elements) {
  how.codec()->start_sum(how.options, accumulator, payload, elements);
}
inline void add_encoded_to_sum(const Compression& how, float* accumulator, const void* payload, size_t elements) {
  how.codec()->add_to_sum(how.options, accumulator, payload, elements);
}

}  // namespace p3
