#include "wire/disagreement.h"

#include <cstring>
#include <sstream>

namespace p3 {
namespace {

std::string described(const std::string& worker, const RoundScalars& scalars) {
  std::ostringstream text;
  text << worker << " (lr " << scalars.lr << ", wd " << scalars.wd << ", rescale_grad " << scalars.rescale;
  if (scalars.updates != 0) text << ", update " << scalars.updates;
  if (scalars.schedule != 1) text << ", schedule " << scalars.schedule;
  text << ")";
  return text.str();
}

}  // namespace

int RoundNumbers::note(int who, const RoundScalars& its) {
  if (first < 0) {
    first = who;
    scalars = its;
  }
  return std::memcmp(&its, &scalars, sizeof its) == 0 ? -1 : first;
}

std::string push_of(const std::string& key, uint64_t round) {
  return "push round " + std::to_string(round) + " of key '" + key + "'";
}

std::string init_of(const std::string& key) { return "wait for its value of key '" + key + "'"; }

Error left_too_early(const std::string& label, const std::string& worker, const std::string& waiting) {
  return Error(ErrorKind::kDisagreement,
               label + ": " + worker + " ended, but others still " + waiting +
                   ". All workers must take the same number of steps, or call join() after their last one.");
}

Error scalars_differ(const std::string& label, const std::string& worker, const RoundScalars& scalars,
                     const std::string& other, const RoundScalars& other_scalars, uint64_t round,
                     const std::string& key) {
  return Error(ErrorKind::kDisagreement,
               label + ": " + described(worker, scalars) + " and " + described(other, other_scalars) +
                   " disagree in round " + std::to_string(round) + " of key '" + key +
                   "'. All workers must use the same optimizer, learning rate, weight decay and batch size.");
}

Error slice_refused(const std::string& label, const std::string& peer, const Header& header, const std::string& what,
                    const std::string& key) {
  return Error(ErrorKind::kProtocol, label + ": " + peer + " sent a slice that is " + what + " (key " + key +
                                         ", slice " + std::to_string(header.slice) + ", round " +
                                         std::to_string(header.round) + ").");
}

}  // namespace p3
