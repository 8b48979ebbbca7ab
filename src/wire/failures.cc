#include "wire/failures.h"

#include <cerrno>
#include <cstring>
#include <sstream>
#include <vector>

#include "p3/rule.h"

namespace p3 {
namespace {

// ", momentum 0.85": where the values of two are not the same. What was announced has none of its own, where that is not
// known.
std::string fields_text(const SharedFields& fields, const SharedFields& others, const Optimizer* optimizer) {
  if (are_same(fields, others)) return {};
  if (fields == nullptr && optimizer == nullptr) return ", its optimizer's numbers as announced";
  const auto names = optimizer == nullptr ? std::vector<std::string>() : field_names(optimizer->spec().name);
  const FieldValues announced = optimizer == nullptr ? FieldValues() : optimizer->values();
  const FieldValues& values = fields == nullptr ? announced : *fields;
  const FieldValues& other_values = others == nullptr ? announced : *others;
  std::ostringstream text;
  for (size_t i = 0; i < values.size(); ++i)
    if (i >= other_values.size() || values[i] != other_values[i])
      text << ", " << (i < names.size() ? names[i] : "number " + std::to_string(i + 1) + " of its optimizer") << ' '
           << values[i];
  return text.str();
}

std::string described(const std::string& worker, const RoundScalars& scalars, const std::string& fields) {
  std::ostringstream text;
  text << worker << " (lr " << scalars.lr << ", wd " << scalars.wd << ", rescale_grad " << scalars.rescale;
  if (scalars.updates != 0) text << ", update " << scalars.updates;
  if (scalars.schedule != 1) text << ", schedule " << scalars.schedule;
  text << fields << ")";
  return text.str();
}

std::string number_text(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

// " (Connection reset by peer)", or nothing for an orderly end.
std::string cause(int error) {
  if (error == EBADMSG) return " (TLS refuses what came from it: altered on the way)";
  return error == 0 ? "" : " (" + std::string(strerror(error)) + ")";
}

// How far the job has come: what the peer was waited for with, or else the last round.
std::string whereabouts(const std::optional<Awaited>& awaited, uint64_t last_round) {
  return !awaited && last_round > 0 ? " after round " + std::to_string(last_round) : clause(awaited);
}

std::string round_of_key(const Awaited& awaited) {
  return "round " + std::to_string(awaited.round) + " of key '" + awaited.key + "'";
}

// What others do: "push round 3 of key 'w'".
std::string deed_of_others(const Awaited& awaited) {
  if (awaited.what == Awaited::What::kFirstValue) return "wait for its value of key '" + awaited.key + "'";
  return "push " + round_of_key(awaited);
}

Subject about(const std::string& peer, const std::optional<Awaited>& awaited) {
  if (!awaited) return {peer, {}, {}};
  if (awaited->what == Awaited::What::kFirstValue) return {peer, awaited->key, {}};
  return {peer, awaited->key, awaited->round};
}

Error silent(const std::string& label, const std::string& silence, bool others_too, const Subject& subject) {
  return {ErrorKind::kPeerSilent,
          label + ": " + silence +
              (others_too ? ", nor from anyone else. This host is cut off from the network, or they are."
                          : ". It is stopped, overloaded or cut off; see its log.") +
              " If it is only slow, raise P3_TIMEOUT_S.",
          subject};
}

}  // namespace

int RoundNumbers::note(int who, const RoundScalars& its, const SharedFields& its_fields) {
  if (first < 0) {
    first = who;
    scalars = its;
    fields = its_fields;
  }
  return std::memcmp(&its, &scalars, sizeof its) == 0 && are_same(its_fields, fields) ? -1 : first;
}

std::string clause(const std::optional<Awaited>& awaited) {
  if (!awaited) return {};
  if (awaited->what == Awaited::What::kRound) return " while waiting for " + round_of_key(*awaited);
  if (awaited->what == Awaited::What::kGradient)
    return " while the gradient of " + round_of_key(*awaited) + " was still being copied on this worker";
  return " while others " + deed_of_others(*awaited);
}

Error peer_lost(const std::string& label, const std::string& peer, int error, const std::optional<Awaited>& awaited,
                uint64_t last_round) {
  return {ErrorKind::kPeerLost,
          label + ": lost " + peer + cause(error) + whereabouts(awaited, last_round) +
              ". Its process ended or its host became unreachable; see its log for the cause.",
          about(peer, awaited)};
}

Error peer_silent(const std::string& label, const std::string& peer, double silence_s, bool others_too,
                  const std::optional<Awaited>& awaited, uint64_t last_round) {
  const std::string silence =
      "nothing heard from " + peer + " for " + number_text(silence_s) + " s" + whereabouts(awaited, last_round);
  return silent(label, silence, others_too, about(peer, awaited));
}

Error peer_reads_nothing(const std::string& label, const std::string& peer, double silence_s, bool others_too,
                         uint64_t waiting_bytes) {
  const std::string silence = peer + " has read nothing for " + number_text(silence_s) + " s of the " +
                              std::to_string(waiting_bytes) + " bytes that wait for it";
  return silent(label, silence, others_too, {peer, {}, {}});
}

Error peer_left(const std::string& label, const std::string& peer, const std::optional<Awaited>& awaited) {
  return {ErrorKind::kPeerLost,
          label + ": " + peer + " left the job" + clause(awaited) + " while this worker still runs.",
          about(peer, awaited)};
}

Error left_too_early(const std::string& label, const std::string& worker, const Awaited& awaited) {
  return {ErrorKind::kDisagreement,
          label + ": " + worker + " ended, but others still " + deed_of_others(awaited) +
              ". All workers must take the same number of steps, or call join() after their last one, "
              "if there is a join().",
          about(worker, awaited)};
}

Error frame_malformed(const std::string& label, const std::string& peer, const std::string& what) {
  return {ErrorKind::kProtocol, label + ": " + peer + " sent " + what + ".", {peer, {}, {}}};
}

Error frame_refused(const std::string& label, const std::string& peer, const Header& header, const std::string& what,
                    const std::optional<std::string>& key) {
  return {ErrorKind::kProtocol,
          label + ": " + peer + " sent a slice that is " + what + " (key " +
              (key ? "'" + *key + "'" : std::to_string(header.key)) + ", slice " + std::to_string(header.slice) +
              ", round " + std::to_string(header.round) + ").",
          {peer, key.value_or(std::string()), header.round}};
}

Error scalars_differ(const std::string& label, const std::string& worker, const RoundSettings& settings,
                     const std::string& other, const RoundSettings& other_settings, uint64_t round,
                     const std::string& key, const Optimizer* optimizer) {
  const std::string its = fields_text(settings.fields, other_settings.fields, optimizer);
  const std::string others = fields_text(other_settings.fields, settings.fields, optimizer);
  return {ErrorKind::kDisagreement,
          label + ": " + described(worker, settings.scalars, its) + " and " +
              described(other, other_settings.scalars, others) + " disagree in round " + std::to_string(round) +
              " of key '" + key +
              "'. All workers must use the same optimizer, learning rate, weight decay, batch size and "
              "norm to clip by.",
          {other, key, round}};
}

}  // namespace p3
