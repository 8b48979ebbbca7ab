// Every codec, and what is asked of all of them.

#include <array>

#include "p3/codec.h"
#include "p3/error.h"

namespace p3 {

// One from each file. Functions, as the order in which files are initialised is not known.
const Codec& float16();
const Codec& two_bit();
const Codec& one_bit();
const Codec& top_k();
const Codec& brain_float();
const Codec& eight_bit();
const Codec& four_bit();
const Codec& largest();

const std::vector<const Codec*>& codecs() {
  static const std::vector<const Codec*> all{&float16(),     &two_bit(),   &one_bit(),  &top_k(),
                                             &brain_float(), &eight_bit(), &four_bit(), &largest()};
  return all;
}

const Codec* codec_of(Encoding encoding) {
  static const auto by_number = [] {
    std::array<const Codec*, 256> all{};
    for (const Codec* codec : codecs()) all[static_cast<size_t>(codec->encoding)] = codec;
    return all;
  }();
  return by_number[static_cast<size_t>(encoding)];
}

const Codec& codec_named(const std::string& name) {
  std::string known;
  for (const Codec* codec : codecs()) {
    if (codec->name == name) return *codec;
    known += (known.empty() ? "" : ", ") + std::string(codec->name);
  }
  throw Error(ErrorKind::kUsage, "compression: there is no type '" + name + "'; there are " + known);
}

void check(const Compression& compression) {
  const Codec* const codec = compression.codec();
  if (codec == nullptr) return;
  for (size_t i = 0; i < codec->options.size(); ++i) {
    const Codec::Option& option = codec->options[i];
    const double value = compression.options[i];
    if (!option.allows(value))
      throw Error(ErrorKind::kUsage, std::string("compression: ") + option.name + " is " + std::to_string(value) +
                                         "; it must be " + option.allowed);
  }
}

size_t Compression::bytes(size_t elements) const {
  const Codec* const its = codec();
  if (its == nullptr) return elements * sizeof(float);
  return its->bytes_with(options, its->sent(options, 0, elements), elements);
}

Compression Compression::if_shorter(size_t elements) const {
  return bytes(elements) < elements * sizeof(float) ? *this : Compression();
}

size_t encoded_bytes(const Compression& how, DType type, size_t elements) {
  if (how.encoding == Encoding::kPlain) return elements * size_of(type);
  return how.codec() == nullptr ? 0 : how.codec()->bytes(how.options, elements);
}

bool can_have_bytes(const Compression& how, DType type, size_t elements, size_t bytes) {
  const Codec* const codec = how.codec();
  return codec == nullptr ? encoded_bytes(how, type, elements) == bytes
                          : codec->can_have_bytes(how.options, elements, bytes);
}

const char* problem_with_encoded(const Compression& how, const void* payload, size_t bytes, size_t elements) {
  const Codec* const codec = how.codec();
  return codec == nullptr ? nullptr : codec->problem_with(how.options, payload, bytes, elements);
}

}  // namespace p3
