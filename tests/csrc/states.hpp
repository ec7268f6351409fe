// States of a few jobs in a file, for the C++ tests of updates.
#pragma once

#include <memory>

#include "scratch.hpp"
#include "update/update.hpp"

namespace infinity::tests {

inline constexpr std::uint64_t kNumel = 40 * 4096;
inline constexpr std::size_t kTile = 4096;
inline const StateFormat kFormat{DType::fp32, Master::weight, DType::fp32, Moments::fp32};
inline const std::size_t kTileBytes = UpdatePipeline::staging_tile_bytes(kFormat, kTile, true);
inline constexpr std::uint64_t kStates = 3 * kNumel * 4;  // bytes of one job's states
inline constexpr std::uint64_t kJobs = 4;

struct Rig {
  Directory directory;
  std::shared_ptr<SwapFile> file;
  std::shared_ptr<IoEngine> engine;
  std::shared_ptr<ThreadPool> pool = std::make_shared<ThreadPool>(2);
  // Never freed, because a device that was given up may still use this memory.
  Pages* staging = new Pages(4 * kTileBytes);
  Pages* grad = new Pages(kNumel * 4, 9);

  explicit Rig(const EngineOptions& options) : engine(std::make_shared<IoEngine>(options)) {
    file = std::make_shared<SwapFile>(directory.file("states"));
    file->preallocate(kJobs * kStates);
    file->keep_checksums(kJobs * kStates);
  }

  // Jobs that run at the same time have separate states, as units have.
  [[nodiscard]] UpdateJob job(bool arithmetic, std::uint64_t which = 0) const {
    UpdateJob result;
    result.format = kFormat;
    result.numel = kNumel;
    Segment segment{};
    segment.begin = 0;
    segment.end = kNumel;
    segment.step = 1;
    segment.hyper.lr = 1e-3;
    segment.hyper.beta1 = 0.9;
    segment.hyper.beta2 = 0.99;
    segment.hyper.eps = 1e-8;
    result.segments = {segment};
    result.weight = {nullptr, file, which * kStates};
    result.exp_avg = {nullptr, file, which * kStates + kNumel * 4};
    result.exp_avg_sq = {nullptr, file, which * kStates + 2 * kNumel * 4};
    result.grad.memory = grad->data();
    result.arithmetic = arithmetic;
    return result;
  }
};

}  // namespace infinity::tests
