// What products keep between calls, for each device: plans, the library's context, workspaces, choices on file.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "gemm_plan.hpp"
#include "shared_choices.hpp"

namespace te_compile {

constexpr size_t kOwnWorkspaceBytes = size_t{32} << 20;  // what NVIDIA advises for Hopper

/// A place in the table; its mutex guards the plan, whose descriptor each call changes.
struct Slot {
  std::mutex mutex;
  std::unique_ptr<Plan> plan;
  bool settled = false;  // nothing more to time
  bool timed = false;
};

/// One lock for all of them.
struct Tables {
  std::mutex mutex;
  std::unordered_map<Key, std::shared_ptr<Slot>, KeyHash> slots;
  std::unordered_map<Key, int, KeyHash> timed_lengths;
  std::map<int, lt::Context*> contexts;
  std::map<std::pair<int, void*>, void*> workspaces;
  std::map<int, std::shared_ptr<SharedChoices>> choices;
};

Tables& tables();

lt::Context* context_of(int device);

/// kOwnWorkspaceBytes for a stream whose caller brings none.
void* own_workspace(int device, void* stream);

std::shared_ptr<Slot> slot_of(const Key& key);

/// Is this length, of the sizes that follow the number of tokens, still among those worth a timing?
bool worth_timing(Key key);

/// Null if nobody asked to keep them.
std::shared_ptr<SharedChoices> choices_for(const Key& key);

}  // namespace te_compile
