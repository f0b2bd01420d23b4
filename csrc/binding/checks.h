// What every binding does before it hands pointers to a kernel: one device, that device current, the current stream, dense
// and aligned memory. Only torch's stable ABI is used, so one build serves every torch from 2.11 on.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fp4 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void require(bool condition, const char* op, const char* what) { STD_TORCH_CHECK(condition, "fp4_csrc::", op, ": ", what); }

// Contiguous and at a multiple of 16 bytes: the kernels read 16 bytes at once.
inline bool is_dense(const Tensor& t) { return t.is_contiguous() && (uintptr_t)t.data_ptr() % 16 == 0; }

// A tensor that a call may lack.
using Optional = std::optional<Tensor>;
using Maybe = const Tensor*;
inline Maybe at(const Optional& t) { return t ? &*t : nullptr; }

// Gives the address of a tensor's data, of a copy's if the tensor is not dense; null of none. Copies live as long as this.
class Dense {
  std::vector<Tensor> copies;

 public:
  const void* operator()(Maybe t) {
    if (!t || is_dense(*t)) return t ? t->data_ptr() : nullptr;
    const Tensor c = torch::stable::contiguous(*t);
    return copies.emplace_back(is_dense(c) ? c : torch::stable::clone(c)).data_ptr();
  }
};

inline int dtype_code(const Tensor& x, const char* op) {
  const ScalarType type = x.scalar_type();
  require(type == ScalarType::BFloat16 || type == ScalarType::Half, op, "activations are bfloat16 or float16");
  return type == ScalarType::Half;
}

// aoti_torch_get_current_cuda_stream of libtorch_cuda, null without one. Python hands it over (fp4_csrc_bind): the binding does not link
// libtorch_cuda, so that one binary serves every build of torch.
using CurrentStream = AOTITorchError(int32_t device_index, void** stream);
inline CurrentStream* current_stream = nullptr;

// The device of `x` is current while this lives; `stream` is its current stream. Nothing waits, nothing is read back.
struct OnDevice {
  torch::stable::accelerator::DeviceGuard guard;
  void* stream = nullptr;

  explicit OnDevice(const Tensor& x, const char* op) : guard(x.get_device_index()) {
    require(current_stream != nullptr, op, "this torch has no CUDA");
    TORCH_ERROR_CODE_CHECK(current_stream(x.get_device_index(), &stream));
  }
};

// Tests run the same operators on the CPU, with emulated kernels: no device to choose, no stream.
struct OnHost {
  void* stream = nullptr;
  OnHost(const Tensor&, const char*) {}
};

}  // namespace fp4
