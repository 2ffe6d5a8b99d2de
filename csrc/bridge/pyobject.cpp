/* torch's Python objects: tensors, wrappers, gradients, dtypes and devices. */
#include "pyobject.h"

#include "bridge.hpp"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

/* THPVariable_Wrap(tensor, type) if this torch release exports it, else NULL without an exception.
 * The argument 0 prefers the overload with `int`, which exists only if the expression is valid. */
template <typename Tensor>
auto wrap_as(const Tensor &tensor, PyTypeObject *type, int)
    -> decltype(THPVariable_Wrap(tensor, type)) {
    PyObject *obj = THPVariable_Wrap(tensor, type);
    if (obj == nullptr) {
        fct::throw_python_error();
    }
    return obj;
}

template <typename Tensor> PyObject *wrap_as(const Tensor &, PyTypeObject *, long) {
    return nullptr;
}

/* Whether `local` is plain; see fct_py_wrapper. */
bool is_plain_local(const at::Tensor &local) {
    return local.layout() == c10::kStrided && !local.requires_grad() && !local.is_conj() &&
           !local.is_neg();
}

/* Whether torch's setter of `.grad` refuses `grad` for its dtype. A `grad_dtype` of None accepts
 * all dtypes. */
bool refuses_grad_dtype(const at::Tensor &tensor, const at::Tensor &grad) {
    const c10::ScalarType dtype = grad.scalar_type();
    return tensor.grad_dtype().value_or(dtype) != dtype;
}

/* A tensor like `local` whose storage has a size but no memory. torch distinguishes aliases of such
 * tensors by their storages. */
at::Tensor tensor_without_memory(const at::Tensor &local, c10::IntArrayRef sizes,
                                 c10::IntArrayRef strides) {
    const int64_t offset = local.storage_offset();
    const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, local.itemsize(), offset);
    c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes,
                         at::DataPtr(nullptr, local.device()), c10::GetAllocator(c10::kMeta), true);
    const c10::DispatchKeySet keys(local.options().computeDispatchKey());
    at::Tensor result =
        at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, local.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    result.unsafeGetTensorImpl()->set_python_dispatch(true);
    return result;
}

} // namespace

namespace fct {

bool python_alive() noexcept {
    if (!Py_IsInitialized()) {
        return false;
    }
#if PY_VERSION_HEX >= 0x030D0000
    return !Py_IsFinalizing();
#else
    return !_Py_IsFinalizing();
#endif
}

} // namespace fct

bool fct_py_is_finalizing(void) {
    return !fct::python_alive();
}

using fct::guarded;

extern "C" {

/* Checks the type, not __class__: an object with a fake __class__ has no TensorImpl. */
bool fct_py_is_tensor(PyObject *obj) {
    return obj != nullptr && THPVariableClass != nullptr &&
           (THPVariable_CheckExact(obj) ||
            PyType_IsSubtype(Py_TYPE(obj), reinterpret_cast<PyTypeObject *>(THPVariableClass)));
}

bool fct_py_is_exact_tensor(PyObject *obj) {
    return THPVariable_CheckExact(obj);
}

fct_tensor *fct_py_tensor(PyObject *obj) {
    if (!fct_py_is_tensor(obj)) {
        return nullptr;
    }
    const at::Tensor &tensor = THPVariable_Unpack(obj);
    return tensor.defined() ? fct::handle(tensor.unsafeGetTensorImpl()) : nullptr;
}

PyObject *fct_py_object_to_traverse(const fct_tensor *t, size_t references) {
    c10::TensorImpl *impl = fct::impl(t);
    /* The object holds a reference to the tensor. As long as there are others, the tensor holds one
     * to the object, too. */
    const bool has_others = c10::raw::intrusive_ptr::use_count(impl) != references + 1;
    return has_others ? nullptr : impl->pyobj_slot()->load_pyobj();
}

const void *fct_py_storage(PyObject *tensor) {
    return THPVariable_Unpack(tensor)
        .unsafeGetTensorImpl()
        ->unsafe_storage()
        .unsafeGetStorageImpl();
}

int fct_py_from_tensor(fct_tensor *t, PyObject **out) {
    return guarded("fct_py_from_tensor", [&] {
        fct::Borrowed tensor(t);
        PyObject *obj = THPVariable_Wrap(*tensor);
        if (obj == nullptr) {
            fct::throw_python_error();
        }
        *out = obj;
    });
}

int fct_py_wrapper(const fct_tensor *local, PyObject *type, const int64_t *sizes,
                   const int64_t *strides, int64_t dims, PyObject **out) {
    return guarded("fct_py_wrapper", [&] {
        auto *wrapper_type = reinterpret_cast<PyTypeObject *>(type);
        TORCH_CHECK_TYPE(
            PyType_IsSubtype(wrapper_type, reinterpret_cast<PyTypeObject *>(THPVariableClass)),
            "a wrapper's class must be a subclass of torch.Tensor");
        fct::Borrowed tensor(local);
        PyObject *wrapper = nullptr;
        if (is_plain_local(*tensor)) {
            const auto count = static_cast<size_t>(dims);
            wrapper = wrap_as(tensor_without_memory(*tensor, {sizes, count}, {strides, count}),
                              wrapper_type, 0);
        }
        *out = wrapper;
    });
}

int fct_py_grad(PyObject *param, PyObject **out) {
    return guarded("fct_py_grad", [&] {
        TORCH_CHECK_TYPE(fct_py_is_tensor(param), "the parameter must be a torch.Tensor");
        PyObject *grad = THPVariable_Wrap(THPVariable_Unpack(param).grad());
        if (grad == nullptr) {
            fct::throw_python_error();
        }
        *out = grad;
    });
}

int fct_py_set_grad(PyObject *param, PyObject *grad) {
    return guarded("fct_py_set_grad", [&] {
        TORCH_CHECK_TYPE(fct_py_is_tensor(param), "the parameter must be a torch.Tensor");
        const bool is_none = grad == nullptr || grad == Py_None;
        TORCH_CHECK_TYPE(is_none || fct_py_is_tensor(grad),
                         "the gradient must be a torch.Tensor or None");
        const at::Tensor &tensor = THPVariable_Unpack(param);
        at::Tensor old; /* destroyed last, because its destructor may run Python code */
        if (is_none) {
            if (tensor.grad().defined()) {
                old = std::exchange(tensor.mutable_grad(), at::Tensor());
            }
        } else if (!refuses_grad_dtype(tensor, THPVariable_Unpack(grad))) {
            old = std::exchange(tensor.mutable_grad(), THPVariable_Unpack(grad));
        } else if (PyObject_SetAttrString(param, "grad", grad) != 0) {
            fct::throw_python_error();
        }
    });
}

PyObject *fct_py_grad_hooks(PyObject *param) {
    if (!fct_py_is_tensor(param)) {
        return nullptr;
    }
    PyObject *hooks = reinterpret_cast<THPVariable *>(param)->post_accumulate_grad_hooks;
    return hooks == Py_None ? nullptr : hooks;
}

fct_dtype fct_py_dtype(PyObject *obj) {
    if (obj == nullptr || obj == Py_None) {
        return FCT_NO_DTYPE;
    }
    if (!THPDtype_Check(obj)) {
        PyErr_Format(PyExc_TypeError, "expected torch.dtype or None, not %.200s",
                     Py_TYPE(obj)->tp_name);
        return -2;
    }
    return static_cast<fct_dtype>(reinterpret_cast<THPDtype *>(obj)->scalar_type);
}

int fct_py_from_dtype(fct_dtype dtype, PyObject **out) {
    return guarded("fct_py_from_dtype", [&] {
        PyObject *obj = Py_None;
        if (dtype != FCT_NO_DTYPE) {
            obj = reinterpret_cast<PyObject *>(torch::getTHPDtype(fct::scalar_type(dtype)));
        }
        Py_INCREF(obj);
        *out = obj;
    });
}

int fct_py_device(PyObject *obj, fct_device *out) {
    return guarded("fct_py_device", [&] {
        if (!THPDevice_Check(obj)) {
            PyErr_Format(PyExc_TypeError, "expected torch.device, not %.200s",
                         Py_TYPE(obj)->tp_name);
            fct::throw_python_error();
        }
        *out = fct::device(reinterpret_cast<THPDevice *>(obj)->device);
    });
}

} // extern "C"
