// Every codec of gradients, as a script has it that gives no options.
#pragma once

#include <cstddef>
#include <vector>

#include "p3/codec.h"

namespace p3 {

inline Compression standard(const Codec& codec) {
  Compression made(codec.encoding);
  for (size_t i = 0; i < codec.options.size(); ++i) made.options[i] = codec.options[i].standard;
  return made;
}

inline std::vector<Compression> codecs_of_gradients() {
  std::vector<Compression> made;
  for (const Codec* codec : codecs())
    if (!codec->makes_steps()) made.push_back(standard(*codec));
  return made;
}

}  // namespace p3
