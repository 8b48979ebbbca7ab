// Whose slices a server has: its own, and those of each lost one that it is the heir of, each in a Registry. And which
// workers are still to say what they have of them (kClaim), behind which comes the last claim, of no key.
// Threads: the receiver's; define() and drop_store() may also be called where inherit() and hand_over() are asked for, as
//          only these two change which registries there are. own() stays where it is.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/registry.h"

namespace p3 {

class Estates {
 public:
  explicit Estates(std::unique_ptr<Registry> own) { estates_.push_back({std::move(own)}); }

  Registry& own() const { return *estates_.front().registry; }
  bool has_inherited() const { return estates_.size() > 1; }
  // Whether there have ever been claims: one that is of no shard may be of what has gone since.
  bool have_been_claimed() const { return have_been_claimed_; }

  // As Server's methods of the same name.
  void define(const KeyPlan& plan, const std::string& name, int store) {
    each_registry([&](Registry& registry) { registry.define(plan, name, store); });
  }
  bool drop_store(int store) {
    bool is_gone = true;
    each_registry([&](Registry& registry) { is_gone = registry.drop_store(store) && is_gone; });
    return is_gone;
  }

  // A lost server's, whose shards are open. Each of these workers will claim what it has of them.
  void inherit(std::unique_ptr<Registry> registry, std::set<int> workers) {
    estates_.push_back({std::move(registry)});
    await_claims(estates_.back(), std::move(workers));
  }
  // The same of its own, which it begins with in a job that runs. As Registry::open().
  void open(std::set<int> workers) {
    own().open();
    await_claims(estates_.front(), std::move(workers));
  }
  // Of these slices claims are made here, with a last one.
  bool are_claimed(int rank) const {
    const Estate* const its = find(rank);
    return its != nullptr && its->is_claimed;
  }
  // The worker's last claim of that rank has come. Returns what is open of it still, and of which it has nothing.
  std::vector<Shard*> note_last_claim(int rank, int worker) {
    std::vector<Shard*> open;
    Estate* const its = find(rank);
    its->claiming.erase(worker);
    add_open_shards(*its->registry, open);
    return open;
  }
  // Nothing more comes of that worker.
  void expect_no_claims_of(int worker) {
    for (Estate& estate : estates_) estate.claiming.erase(worker);
  }
  bool await_claims() const {
    return std::any_of(estates_.begin(), estates_.end(), [](const Estate& estate) { return awaits_claims(estate); });
  }
  bool await_claims_of(int rank) const { return awaits_claims(*find(rank)); }

  bool has_inherited(int rank) const { return rank != own().rank() && find(rank) != nullptr; }
  // Forgets what it has inherited of that one, whose claims have all come. Memory is free when nobody borrows it any more.
  void hand_over(int rank) {
    const auto its = estates_.begin() + (find(rank) - estates_.data());
    its->registry->leave();
    leaving_.push_back(std::move(its->registry));
    estates_.erase(its);
    free_idle();
  }
  void free_idle() {
    each_registry([](Registry& registry) { registry.free_idle(); });
    const auto has_left = [](const auto& registry) {
      registry->free_idle();
      return registry->has_left();
    };
    leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(), has_left), leaving_.end());
  }

  template <typename Visit>
  void each_registry(Visit visit) const {
    for (const Estate& estate : estates_) visit(*estate.registry);
  }
  template <typename Visit>
  void each_shard(Visit visit) const {
    each_registry([&](const Registry& registry) { registry.each_shard(visit); });
  }
  // Asks each shard until one answers anything.
  template <typename Ask>
  auto first_answer(Ask ask) const -> decltype(ask(std::declval<Shard&>())) {
    for (const Estate& estate : estates_)
      if (auto answer = estate.registry->first_answer(ask)) return answer;
    return {};
  }
  Shard* find(const Header& header) const {
    for (const Estate& estate : estates_)
      if (Shard* shard = estate.registry->find(header)) return shard;
    return nullptr;
  }
  // In a list, as what is done to them may look a key up.
  std::vector<Shard*> open_shards() const {
    std::vector<Shard*> open;
    each_registry([&](const Registry& registry) { add_open_shards(registry, open); });
    return open;
  }

 private:
  struct Estate {
    std::unique_ptr<Registry> registry;
    bool is_claimed = false;
    std::set<int> claiming{};  // workers whose last claim is still to come
  };

  static void add_open_shards(const Registry& registry, std::vector<Shard*>& open) {
    registry.each_shard([&](Shard& shard) {
      if (shard.claims != nullptr) open.push_back(&shard);
    });
  }
  static bool awaits_claims(const Estate& estate) {
    const auto is_open = [](const Shard& shard) { return shard.claims != nullptr; };
    return !estate.claiming.empty() || estate.registry->first_answer(is_open);
  }

  void await_claims(Estate& estate, std::set<int> workers) {
    estate.is_claimed = have_been_claimed_ = true;
    estate.claiming = std::move(workers);
  }
  const Estate* find(int rank) const {
    for (const Estate& estate : estates_)
      if (estate.registry->rank() == rank) return &estate;
    return nullptr;
  }
  Estate* find(int rank) { return const_cast<Estate*>(std::as_const(*this).find(rank)); }

  std::vector<Estate> estates_;                     // the first one is the server's own
  std::vector<std::unique_ptr<Registry>> leaving_;  // that were handed over, and are not idle
  bool have_been_claimed_ = false;
};

}  // namespace p3
