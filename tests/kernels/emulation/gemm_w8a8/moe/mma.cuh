// The MMAs of the grouped GEMM are those of the tiled one, in groups.
#pragma once

#include "gemm_w8a8/tiled/wgmma.cuh"
