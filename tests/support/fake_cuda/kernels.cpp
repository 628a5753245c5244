// Kernels for "cuda" that launch nothing, in a build of torch that has none, on real tensors without
// memory.
//
// Everything that the host does before a launch happens: Python, autograd, the dispatcher, and the
// allocation of a tensor object for each result. Results of operators that are not listed below get
// their shapes from the operator's own function for the "meta" device, at the first call with
// arguments of these shapes; later calls look them up.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <unordered_map>

namespace {

using at::IntArrayRef;
using at::ScalarType;
using at::Tensor;
using std::optional;

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// Addresses are distinct, like those of real memory, but nothing lies there.
struct NoMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t) override {
    next_ += 512;
    return c10::DataPtr(reinterpret_cast<void*>(next_), kDevice);
  }
  void copy_data(void*, const void*, std::size_t) const override {}

 private:
  uintptr_t next_ = 0;
};
NoMemory kNoMemory;

Tensor strided(IntArrayRef size, IntArrayRef stride, ScalarType dtype) {
  return at::detail::empty_strided_generic(size, stride, &kNoMemory, kKeys, dtype);
}

Tensor contiguous(IntArrayRef size, ScalarType dtype) {
  return at::detail::empty_generic(size, &kNoMemory, kKeys, dtype, std::nullopt);
}

Tensor empty(IntArrayRef size, optional<ScalarType> dtype, optional<at::Layout>,
             optional<at::Device>, optional<bool>, optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &kNoMemory, kKeys, dtype.value_or(ScalarType::Float), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<ScalarType> dtype,
                     optional<at::Layout>, optional<at::Device>, optional<bool>) {
  return strided(size, stride, dtype.value_or(ScalarType::Float));
}

Tensor mm(const Tensor& a, const Tensor& b) {
  return contiguous({a.size(0), b.size(1)}, a.scalar_type());
}

Tensor scaled_mm(const Tensor& a, const Tensor& b, const Tensor&, const Tensor&,
                 const optional<Tensor>&, const optional<Tensor>&, optional<ScalarType> dtype, bool) {
  return contiguous({a.size(0), b.size(1)}, dtype.value_or(a.scalar_type()));
}

Tensor& scaled_mm_into(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                       const optional<Tensor>&, const optional<Tensor>&, optional<ScalarType>, bool,
                       Tensor& out) {
  return out;
}

// (Without a kernel, a composite implementation would multiply the groups one by one.)
Tensor grouped_mm(const Tensor& a, const Tensor& b, const optional<Tensor>& ends,
                  const optional<Tensor>&, optional<ScalarType>) {
  if (a.dim() == 2 && b.dim() == 2) {
    return contiguous({ends->size(0), a.size(0), b.size(1)}, a.scalar_type());
  }
  return contiguous({a.size(0), b.size(2)}, a.scalar_type());
}

Tensor& unchanged(Tensor& self) { return self; }

Tensor& filled(Tensor& self, const at::Scalar&) { return self; }

Tensor& copied(Tensor& self, const Tensor&, bool) { return self; }

Tensor as_meta(const Tensor& t) {
  return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
}

// The arguments with tensors of the device replaced by meta tensors.
c10::IValue on_meta(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
    return as_meta(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(t.is_cuda() ? as_meta(t) : t);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector()) {
      list.push_back(t && t->is_cuda() ? as_meta(*t) : t);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::DeviceType::Meta);
  return value;
}

void resize_as(const Tensor& out, const Tensor& meta) {
  auto* impl = out.unsafeGetTensorImpl();
  if (impl->sizes() == meta.sizes()) return;
  impl->set_sizes_and_strides(meta.sizes(), meta.strides());
  const size_t bytes = at::detail::computeStorageNbytes(
      meta.sizes(), meta.strides(), meta.itemsize(), 0);
  out.storage().unsafeGetStorageImpl()->set_nbytes(bytes);
}

template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

void append_tensor(std::string& key, const Tensor& t) {
  append(key, t.scalar_type());
  append(key, t.device().type());
  append(key, t.dim());
  for (int64_t i = 0; i < t.dim(); ++i) {
    append(key, t.size(i));
    append(key, t.stride(i));
  }
}

// Appends what the shapes of results may depend on.
void append_value(std::string& key, const c10::IValue& value) {
  append(key, value.isNone() ? 'n' : value.isTensor() ? 't' : value.isList() ? 'l' : 'o');
  if (value.isTensor()) {
    append(key, value.toTensor().defined());
    if (value.toTensor().defined()) append_tensor(key, value.toTensor());
  } else if (value.isList()) {
    const auto list = value.toListRef();
    append(key, list.size());
    for (const auto& each : list) append_value(key, each);
  } else if (value.isInt()) {
    append(key, value.toInt());
  } else if (value.isBool()) {
    append(key, value.toBool());
  } else if (value.isDevice()) {
    append(key, value.toDevice().type());
  } else if (!value.isNone() && !value.isDouble()) {
    TORCH_CHECK(false, "fake CUDA: an argument of type ", value.tagKind());
  }
}

struct Found {
  std::vector<Tensor> written;  // on meta, as the operator left them
  std::vector<c10::IValue> returned;
};

Found on_first_call(const c10::OperatorHandle& op, const std::vector<c10::IValue>& given) {
  Found found;
  torch::jit::Stack inner;
  for (const auto& value : given) inner.push_back(on_meta(value));
  const std::vector<c10::IValue> metas(inner);
  op.callBoxed(&inner);
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite() && given[i].isTensor();
    found.written.push_back(writes ? metas[i].toTensor() : Tensor());
  }
  found.returned = inner;
  return found;
}

void run_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static thread_local std::unordered_map<std::string, Found> known;
  const size_t count = op.schema().arguments().size();
  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  torch::jit::drop(stack, count);
  std::string key;
  append(key, &op.schema());
  for (const auto& value : given) append_value(key, value);
  auto place = known.find(key);
  if (place == known.end()) place = known.emplace(key, on_first_call(op, given)).first;
  // What is written into is returned itself.
  std::vector<c10::IValue> written;
  for (size_t i = 0; i < count; ++i) {
    const Tensor& meta = place->second.written[i];
    if (!meta.defined()) continue;
    resize_as(given[i].toTensor(), meta);
    written.push_back(given[i]);
  }
  size_t next = 0;
  for (const auto& value : place->second.returned) {
    if (next < written.size()) {
      stack->push_back(written[next++]);
    } else if (value.isTensor() && value.toTensor().defined()) {
      const Tensor& t = value.toTensor();
      stack->push_back(strided(t.sizes(), t.strides(), t.scalar_type()));
    } else {
      stack->push_back(value);
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_meta>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("mm", &mm);
  m.impl("_grouped_mm", &grouped_mm);
  m.impl("_scaled_mm", &scaled_mm);
  m.impl("_scaled_mm.out", &scaled_mm_into);
  m.impl("zero_", &unchanged);
  m.impl("fill_.Scalar", &filled);
  m.impl("copy_", &copied);
}
