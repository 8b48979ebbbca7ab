// Throws std::invalid_argument, whose text says what, for a job that cannot be simulated.
#pragma once

#include "simulator/job.h"

namespace p3::simulator {

void check(const Job& job);

}  // namespace p3::simulator
