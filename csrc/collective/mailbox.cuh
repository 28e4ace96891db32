// A rank's mailbox: what other ranks have sent to it for the present launch, and how it sends.
//
// Each launch, an epoch, uses one of three regions in turn. A word of a region that has not arrived
// yet has all bits set, which is a NaN of every dtype; a sender writes another NaN instead. So data
// is its own flag, and no fence stands between them. Launch e clears the region of launch e - 1:
// all of that has been read. Its next use is in launch e + 2, for which others send only once they
// have what this rank sent in launch e + 1, after the clearing. So a launch without rows, in which
// nobody waits, must be no epoch: it leaves the mailbox closed.
//
// Waiting is bounded. When it ends in vain, an error is left in the control block and in memory of
// the host, what has not come is taken as NaN, and neither this launch nor later ones wait again.
#pragma once

#include <cstdint>

#include "common/debug.cuh"
#include "common/vector.cuh"
#include "params.h"
#include "peer_memory.cuh"

namespace ostinato {
namespace {

constexpr uint32_t kAbsent = 0xffffffffu;
constexpr uint32_t kSentNan = 0x7fff7fffu;  // for a word that would look absent

__device__ __forceinline__ uint32_t present(uint32_t word) {
  return word == kAbsent ? kSentNan : word;
}

__device__ __forceinline__ bool is_absent(const uint4& words) {
  return words.x == kAbsent || words.y == kAbsent || words.z == kAbsent || words.w == kAbsent;
}

template <int kRanks>
class Mailbox {
 public:
  // Reads constants only: may be called before the wait for the preceding kernel.
  __device__ __forceinline__ explicit Mailbox(const CollectiveParams& p)
      : control_(p.control),
        region_(static_cast<uint32_t>(p.region_vectors)),
        timeout_(static_cast<uint64_t>(p.timeout_ns)),
        rank_(p.rank),
        size_(p.size),
        own_(buffer_of(rank_)) {}

  // Called by every thread after the wait: the preceding kernel may be another launch.
  __device__ __forceinline__ void open() {
    epoch_ = load_word(&control_->epoch);
    used_ = load_word(&control_->used);
    gave_up_ = load_word(&control_->error) != 0;
    offset_ = epoch_ % 3 * region_;
    own_ += offset_;
  }

  // A region has a segment for each other rank, in rank order: that of rank `from` at rank `at`.
  static __device__ __forceinline__ uint32_t segment_of(int from, int at) {
    return static_cast<uint32_t>(from - (from > at ? 1 : 0));
  }

  // Sends a vector to every other rank, as the vector of this index of this rank's segment.
  __device__ __forceinline__ void send_to_others(uint32_t index, uint32_t segment,
                                                 const uint4& words) const {
    const uint4 sent = sendable(words);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r < size_ && r != rank_ && !gave_up_) {
        store_to_peer(buffer_of(r) + offset_ + segment_of(rank_, r) * segment + index, sent);
      }
    }
  }

  // Likewise to every rank, itself too, as the vector of this index of the region.
  __device__ __forceinline__ void send_to_all(uint32_t index, const uint4& words) const {
    send_to_others(index, 0, words);
    if (!gave_up_) {
      store_to_peer(own_ + index, sendable(words));
    }
  }

  // Likewise to another one, as the vector of this index of this rank's segment.
  __device__ __forceinline__ void send(int to, uint32_t index, uint32_t segment,
                                       const uint4& words) const {
    if (!gave_up_) {
      store_to_peer(buffer_of(to) + offset_ + segment_of(rank_, to) * segment + index,
                    sendable(words));
    }
  }

  // Waits for the vector of this index of each rank's segment, and passes them on in rank order:
  // take(r, words). That of this rank is `own`.
  template <typename Take>
  __device__ __forceinline__ void receive_each(uint32_t index, uint32_t segment, const uint4& own,
                                               Take&& take) {
    const uint4* const first = own_ + index;
    uint4 words[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {  // all of them in flight
      words[r] = r == rank_ ? own : absent();
      if (r < size_ && r != rank_ && !gave_up_) {
        words[r] = load_from_peer(first + segment_of(r, rank_) * segment);
      }
    }
    while (!gave_up_) {
      int missing = -1;
#pragma unroll
      for (int r = kRanks - 1; r >= 0; --r) {
        if (r < size_ && r != rank_ && is_absent(words[r])) {
          missing = r;
          words[r] = load_from_peer(first + segment_of(r, rank_) * segment);
        }
      }
      if (missing < 0) {
        break;
      }
      look(missing, timeout_);
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r < size_) {
        take(r, words[r]);
      }
    }
  }

  // Waits for the vector of an index that rank `from` sends, which may wait for others itself: for
  // twice as long, so that as a rule the rank that is named is the one that did not come. If not,
  // the named one has given up itself, and names another.
  __device__ __forceinline__ uint4 receive(int from, uint32_t index) {
    uint4 words = gave_up_ ? absent() : load_from_peer(own_ + index);
    while (is_absent(words) && !gave_up_) {
      words = load_from_peer(own_ + index);
      look(from, 2 * timeout_);
    }
    return words;
  }

  // Clears what the last launch used; thread `thread` of `threads` does its share.
  __device__ __forceinline__ void clear(uint32_t thread, uint32_t threads) const {
    uint4* const cleared = buffer_of(rank_) + (epoch_ + 2) % 3 * region_;
    for (uint32_t i = thread; i < used_; i += threads) {
      cleared[i] = absent();
    }
  }

  // Ends the launch: called by all threads of each of `ctas` CTAs, at last.
  __device__ __forceinline__ void close(uint32_t used, uint32_t ctas) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();  // this CTA has read the words that the last one changes
      if (atomicInc(&control_->ended, ctas - 1) == ctas - 1) {
        store_word(&control_->used, used);
        store_word(&control_->epoch, epoch_ + 1);
      }
    }
  }

 private:
  static constexpr uint32_t kTriesPerLook = 64;    // at the clock
  static constexpr uint32_t kLooksPerAsking = 64;  // of the host, over PCIe

  static __device__ __forceinline__ uint4 absent() {
    return make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
  }

  static __device__ __forceinline__ uint4 sendable(const uint4& words) {
    return make_uint4(present(words.x), present(words.y), present(words.z), present(words.w));
  }

  // Counts an attempt, and gives up where waiting has no end.
  __device__ __forceinline__ void look(int from, uint64_t timeout) {
    if (++tries_ % kTriesPerLook != 0) {
      return;
    }
    const uint64_t now = nanoseconds();
    if (since_ == 0) {
      since_ = now;
    }
    uint32_t error = load_word(&control_->error);
    if (error == 0 && now - since_ >= timeout) {
      error = fail(1 + static_cast<uint32_t>(from));
    }
    if (error == 0 && tries_ % (kTriesPerLook * kLooksPerAsking) == 0 &&
        load_word(control_->host) != 0) {
      error = fail(kStopped);
    }
    gave_up_ = error != 0;
  }

  __device__ __forceinline__ uint32_t fail(uint32_t error) const {
    if (atomicCAS(&control_->error, 0u, error) == 0) {
      store_word(control_->host + 1, error);
    }
    return error;
  }

  // Always from the L1 cache: in registers, the addresses of all ranks would leave too few.
  __device__ __forceinline__ uint4* buffer_of(int rank) const {
    return reinterpret_cast<uint4*>(load_address(control_->buffers + rank));
  }

  CollectiveControl* const control_;
  const uint32_t region_;  // vectors
  const uint64_t timeout_;
  const int rank_;
  const int size_;
  uint4* own_;           // the present region of this rank
  uint32_t offset_ = 0;  // of the present region, in vectors
  uint64_t since_ = 0;   // when this thread began to wait
  uint32_t epoch_ = 0;
  uint32_t used_ = 0;
  uint32_t tries_ = 0;
  bool gave_up_ = false;
};

}  // namespace
}  // namespace ostinato
