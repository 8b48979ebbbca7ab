// Groups of workers with shared leaders: neighbours by rank are a group, and groups may be in greater ones. For the slices of
// a server one member of each group leads. With ranks written in digits, the first modulo sizes[0], the next modulo
// sizes[1], and so on, that is the member whose digit is the one of the server's home; so each member leads for some servers,
// and each sum goes to who agrees with the home in one digit more (docs/groups.md).
// Threads: a plain value; pure functions.
#pragma once

#include <string>
#include <vector>

namespace p3 {

struct Groups {
  int workers = 0;
  std::vector<int> sizes;  // of groups, of groups of these, ...; of several, a multiple of all of them are workers
  std::vector<int> homes;  // by server: a rank, whose digits its leaders have

  // Why there are no such groups in a job of so many servers, in words; empty: there are.
  std::string problem(int num_servers) const;

  // To whom a worker pushes the slices of that server; itself: to the server.
  int leader_of(int worker, int server) const;
  // Who pushes them to it. At `level` it adds up `places`, its own at `own`, this one's at `place`; the levels follow each
  // other, and what one adds up is its own at the next.
  struct Follower {
    int worker, level, place;
  };
  struct Level {
    int places, own;
  };
  std::vector<Follower> followers_of(int worker, int server) const;
  std::vector<Level> levels_of(int worker, int server) const;
  // Of all at once: workers that differ from this one in one digit, by rank.
  std::vector<int> members(int worker) const;

 private:
  struct Digit {
    int weight, places, own, wanted;  // `places`: members there are, fewer in a last group that is smaller
    int rank_at(int worker, int place) const { return worker + (place - own) * weight; }
  };
  std::vector<Digit> digits_of(int worker, int home) const;
};

}  // namespace p3
