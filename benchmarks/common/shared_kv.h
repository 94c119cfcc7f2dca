// A key-value space in memory that forked ranks share: all a communicator needs to come about, and no store
// to set up. Keys are never taken away. Create it before the fork. Any thread of any rank may call; waiting
// polls and sleeps.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "benchmarks/common/clock.h"
#include "benchmarks/common/shared_array.h"
#include "lockstep/engine/engine_abi.h"

namespace bench {

class SharedKv {
 public:
  SharedKv()
      : shared_(1),
        host_{.struct_size = sizeof(lockstep_host),
              .context = this,
              .log = nullptr,
              .kv_set = &SharedKv::set,
              .kv_get = &SharedKv::get} {}

  // What a communicator's config asks for; lives as long as this object.
  const lockstep_host* host() const { return &host_; }

 private:
  static constexpr std::size_t kEntries = 1024;
  struct Entry {
    char key[256];
    char value[1024];
    std::size_t length;
  };
  struct Table {
    std::atomic_flag locked;  // zero-filled memory: not locked
    std::size_t n_entries;
    Entry entries[kEntries];
  };
  // std::atomic_flag is not trivially copyable, so the table lies in raw bytes.
  struct Raw {
    alignas(64) unsigned char bytes[sizeof(Table)];
  };

  class Lock {
   public:
    explicit Lock(Table& table) : table_(table) {
      while (table_.locked.test_and_set(std::memory_order_acquire)) ::sched_yield();
    }
    ~Lock() { table_.locked.clear(std::memory_order_release); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Table& table_;
  };

  Table& table() { return *reinterpret_cast<Table*>(shared_[0].bytes); }
  static Entry* find(Table& table, std::string_view key) {
    Entry* const end = table.entries + table.n_entries;
    Entry* const found =
        std::find_if(table.entries, end, [&](const Entry& entry) { return key == entry.key; });
    return found == end ? nullptr : found;
  }

  static lockstep_status set(void* context, const char* key, const void* value, std::size_t length) {
    Table& table = static_cast<SharedKv*>(context)->table();
    const Lock lock(table);
    Entry* entry = find(table, key);
    if (entry == nullptr) {
      if (table.n_entries == kEntries || std::strlen(key) >= sizeof(entry->key)) return LOCKSTEP_RESOURCE;
      entry = &table.entries[table.n_entries++];
      std::strcpy(entry->key, key);
    }
    if (length > sizeof(entry->value)) return LOCKSTEP_RESOURCE;
    std::memcpy(entry->value, value, length);
    entry->length = length;
    return LOCKSTEP_OK;
  }

  static lockstep_status get(void* context, const char* key, void* value, std::size_t capacity,
                             std::size_t* length, std::int64_t deadline_ns) {
    Table& table = static_cast<SharedKv*>(context)->table();
    for (;;) {
      {
        const Lock lock(table);
        if (const Entry* entry = find(table, key)) {
          std::memcpy(value, entry->value, std::min(capacity, entry->length));
          *length = entry->length;
          return LOCKSTEP_OK;
        }
      }
      if (now_ns() >= deadline_ns) return LOCKSTEP_TIMEOUT;
      ::usleep(200);
    }
  }

  SharedArray<Raw> shared_;
  lockstep_host host_;
};

}  // namespace bench
