#include "p3/groups.h"

#include <algorithm>

namespace p3 {

std::string Groups::problem(int num_servers) const {
  if (homes.size() != static_cast<size_t>(num_servers)) return "each server needs a home";
  if (std::any_of(homes.begin(), homes.end(), [](int home) { return home < 0; })) return "a home is a rank";
  if (sizes.empty()) return "they have no size";
  int all = 1;
  for (int size : sizes) {
    if (size < 1 || size > workers || all > workers / size) return "they are larger than the job";
    all *= size;
  }
  return sizes.size() == 1 || workers % all == 0 ? "" : "groups of groups need a multiple of them all";
}

std::vector<Groups::Digit> Groups::digits_of(int worker, int home) const {
  std::vector<Digit> digits;
  int weight = 1;
  for (int size : sizes) {
    const int own = worker / weight % size, first = worker - own * weight;
    const int places = std::min(size, (workers - first + weight - 1) / weight);
    digits.push_back({weight, places, own, home / weight % size % places});
    weight *= size;
  }
  return digits;
}

int Groups::leader_of(int worker, int server) const {
  for (const Digit& digit : digits_of(worker, homes[static_cast<size_t>(server)]))
    if (digit.own != digit.wanted) return digit.rank_at(worker, digit.wanted);
  return worker;
}

std::vector<Groups::Follower> Groups::followers_of(int worker, int server) const {
  std::vector<Follower> followers;
  int level = 0;
  for (const Digit& digit : digits_of(worker, homes[static_cast<size_t>(server)])) {
    if (digit.own != digit.wanted) break;
    for (int place = 0; place < digit.places; ++place)
      if (place != digit.own) followers.push_back({digit.rank_at(worker, place), level, place});
    ++level;
  }
  return followers;
}

std::vector<Groups::Level> Groups::levels_of(int worker, int server) const {
  std::vector<Level> levels;
  for (const Digit& digit : digits_of(worker, homes[static_cast<size_t>(server)])) {
    if (digit.own != digit.wanted) break;
    levels.push_back({digit.places, digit.own});
  }
  return levels;
}

std::vector<int> Groups::members(int worker) const {
  std::vector<int> members;
  for (const Digit& digit : digits_of(worker, 0))
    for (int place = 0; place < digit.places; ++place)
      if (place != digit.own) members.push_back(digit.rank_at(worker, place));
  std::sort(members.begin(), members.end());
  return members;
}

}  // namespace p3
