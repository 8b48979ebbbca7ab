#include "p3/slicing.h"

#include <algorithm>
#include <limits>
#include <string>

#include "p3/rule.h"
#include "plan/rows.h"

namespace p3 {
namespace {

constexpr uint64_t kMaxPayload = std::numeric_limits<uint32_t>::max();
constexpr uint64_t kMaxSlices = std::numeric_limits<uint32_t>::max();
constexpr uint64_t kMaxRows = uint64_t{1} << 31;  // so that counts fit into RowsHeader, and products into 64 bits

// Of a key that is summed: of the whole.
uint64_t slices_of_part(const KeyPlan& plan) {
  return plan.elements == 0 ? 1 : (plan.elements + plan.slice_elements - 1) / plan.slice_elements;
}

std::string problem_with_cut(const KeyPlan& plan) {
  const size_t element_bytes = size_of(sum_type(plan.dtype));
  if (plan.is_gathered() && (plan.has_rows() || plan.elements == 0 || plan.dtype != DType::kFloat32 ||
                             slices_of_part(plan) > kMaxSlices / plan.parts))
    return "it cannot be gathered";
  if (!plan.has_rows()) return plan.slice_elements * element_bytes <= kMaxPayload ? "" : "its slices are too large";
  const uint64_t rows = row_count(plan);
  const bool fits = plan.elements % plan.row_elements == 0 && rows <= kMaxRows && plan.partitions >= 1 &&
                    plan.partitions <= std::max<uint64_t>(rows, 1) &&
                    max_rows_payload(plan, element_bytes) <= kMaxPayload;
  return fits ? "" : "its rows cannot be cut into such partitions";
}

}  // namespace

std::string problem_with(const KeyPlan& plan) {
  if (plan.slice_elements == 0 || !is_known(plan.dtype)) return "it cannot be cut into slices";
  if (std::string problem = problem_with_cut(plan); !problem.empty()) return problem;
  const bool is_dense = !plan.has_rows() && !plan.is_gathered();
  const Codec* const codec = plan.codec.codec();
  if (codec != nullptr && (!is_dense || !codec->is_for(plan.dtype, /*is_vector=*/false)))
    return std::string(codec->name) + " is not for such keys";
  const Codec* const of_values = plan.value_codec.codec();
  if (of_values != nullptr &&
      (!is_dense || !plan.is_synchronous() || plan.takes_steps() || !of_values->encodes_values() ||
       of_values->residuals() > 1 || !of_values->is_for(plan.dtype, /*is_vector=*/false)))
    return std::string("what comes back of such keys cannot be ") + of_values->name;
  if ((plan.update == Update::kSteps) != plan.codec.makes_steps())
    return "its codec and its update contradict each other";
  if ((plan.update == Update::kWorkers) != plan.is_gathered()) return "what is gathered, the workers update";
  if (!plan.is_synchronous() && plan.update != Update::kServers)
    return "with staleness the servers update a key, by whole gradients";
  if (plan.has_quorum() && (!is_dense || plan.staleness != kUnboundedStaleness || !is_float(plan.dtype) ||
                            plan.averages() || !(plan.grace_s >= 0 && plan.grace_s <= kMostGraceS)))
    return "a quorum is for dense sums of floating point numbers, with a grace of at least 0 s, and each worker counts "
           "rounds of its own";
  if (plan.tells_norms() && (!is_dense || codec != nullptr || !plan.is_synchronous() || plan.dtype != DType::kFloat64 ||
                             plan.slice_elements != kNormElements || plan.elements % kNormElements != 0))
    return "norms have two float64 on each server, and synchronous rounds";
  if (plan.averages() && !is_float(plan.dtype)) return std::string("averages cannot be of type ") + name_of(plan.dtype);
  if (plan.averages() && plan.update == Update::kSteps) return "steps are summed and not averaged";
  return "";
}

std::string problem_with(const KeyPlan& plan, int workers, bool outlives_workers) {
  const bool is_stale = !plan.is_synchronous() && !plan.has_quorum();
  if ((is_stale || plan.is_gathered()) && outlives_workers)
    return std::string("it has ") + (plan.is_gathered() ? "factors" : "staleness") +
           ", and nobody can go on without a worker of such a key";
  if (plan.quorum > static_cast<uint32_t>(workers))
    return "it has a quorum of " + std::to_string(plan.quorum) + ", but there are " + std::to_string(workers) +
           " workers";
  if (plan.is_gathered() && plan.parts != static_cast<uint32_t>(workers))
    return "it has " + std::to_string(plan.parts) + " parts, one of each worker, but there are " +
           std::to_string(workers) + " workers";
  return "";
}

// What the workers do of SGD, nobody else must do as well.
std::string problem_with(const KeyPlan& plan, const Optimizer& optimizer) {
  if (plan.takes_steps() && !optimizer.rule().is_plain_sgd())
    return "it has deep gradient compression, which is for SGD with momentum alone";
  if (plan.tells_norms()) return "the norm of its store is that of sums, and an optimizer leaves none";
  return "";
}

std::string problem_with_servers(const KeyPlan& plan, int num_servers) {
  for (const uint16_t server : plan.servers)
    if (server >= num_servers) return "there is no server " + std::to_string(server);
  return plan.tells_norms() && !plan.servers.empty() ? "norms have a slice on each server" : "";
}

uint32_t slice_count(const KeyPlan& plan) {
  if (plan.has_rows()) return plan.partitions;
  return static_cast<uint32_t>(slices_of_part(plan) * std::max<uint32_t>(plan.parts, 1));
}

Slice slice_at(const KeyPlan& plan, uint32_t index) {
  uint64_t part_begin = 0, number = index;
  if (plan.is_gathered()) {
    const uint64_t in_part = slices_of_part(plan);
    part_begin = index / in_part * plan.elements;
    number = index % in_part;
  }
  const uint64_t offset = number * plan.slice_elements;
  const uint64_t rest = plan.elements - offset;
  return {part_begin + offset, static_cast<uint32_t>(std::min<uint64_t>(rest, plan.slice_elements))};
}

int worker_of(const KeyPlan& plan, uint32_t index) { return static_cast<int>(index / slices_of_part(plan)); }

int server_of(const KeyPlan& plan, uint32_t index, int num_servers) {
  const uint64_t turn = plan.first_slice + index;
  if (plan.servers.empty()) return static_cast<int>(turn % static_cast<uint64_t>(num_servers));
  return plan.servers[turn % plan.servers.size()];
}

}  // namespace p3
