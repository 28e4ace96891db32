// Memory of 2 MiB pages, put in an order that makes the half of an address a parity of its bits.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <vector>
template <class F>
static F* get(const char* name) {
  void* p = nullptr;
  cudaDriverEntryPointQueryResult r;
  cudaGetDriverEntryPoint(name, &p, cudaEnableDefault, &r);
  return (F*)p;
}
#define CK(x)                          \
  do {                                 \
    CUresult r_ = (x);                 \
    if (r_ != CUDA_SUCCESS) {          \
      printf("%s: %d\n", #x, int(r_)); \
      return int(r_);                  \
    }                                  \
  } while (0)
constexpr size_t kPage = 2 << 20;
static std::vector<CUmemGenericAllocationHandle> handles;
extern "C" int vmm_create(int n, uint64_t* va) {
  auto* create = get<decltype(cuMemCreate)>("cuMemCreate");
  auto* reserve = get<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  auto* map = get<decltype(cuMemMap)>("cuMemMap");
  auto* access = get<decltype(cuMemSetAccess)>("cuMemSetAccess");
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = 0;
  handles.resize(n);
  for (int i = 0; i < n; ++i) CK(create(&handles[i], kPage, &prop, 0));
  CUdeviceptr p;
  CK(reserve(&p, n * kPage, 1 << 30, 0, 0));
  for (int i = 0; i < n; ++i) CK(map(p + i * kPage, kPage, 0, handles[i], 0));
  CUmemAccessDesc d = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CK(access(p, n * kPage, &d, 1));
  *va = p;
  return 0;
}
extern "C" int vmm_order(uint64_t old_va, int n, const int* order, int m, uint64_t* va) {
  auto* unmap = get<decltype(cuMemUnmap)>("cuMemUnmap");
  auto* reserve = get<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  auto* map = get<decltype(cuMemMap)>("cuMemMap");
  auto* access = get<decltype(cuMemSetAccess)>("cuMemSetAccess");
  CK(unmap(old_va, n * kPage));
  CUdeviceptr p;
  CK(reserve(&p, m * kPage, 1 << 30, 0, 0));
  for (int i = 0; i < m; ++i) CK(map(p + i * kPage, kPage, 0, handles[order[i]], 0));
  CUmemAccessDesc d = {{CU_MEM_LOCATION_TYPE_DEVICE, {0}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CK(access(p, m * kPage, &d, 1));
  *va = p;
  return 0;
}
