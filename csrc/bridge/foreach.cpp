/* torch's foreach operations: additions of partial gradients, and transfers on devices without
 * kernels in csrc/kernels. An operation is one kernel launch if torch has a kernel for the list,
 * like on CUDA. Otherwise it is one launch for each tensor. torch's FSDP2 uses the same
 * transfers. */
#include "gil.hpp"
#include "tensor.h"

#include <vector>

using fct::BelowAutograd;
using fct::Borrowed;
using fct::DeviceCall;
using fct::guarded;
using fct::view_half_as_real;

namespace {

/* at::Tensor objects over borrowed handles. */
class BorrowedList {
  public:
    BorrowedList(fct_tensor *const *tensors, size_t count) {
        list_.reserve(count);
        for (size_t i = 0; i < count; i++) {
            list_.push_back(
                at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(
                    fct::impl(tensors[i]))));
        }
    }
    BorrowedList(const BorrowedList &) = delete;
    BorrowedList &operator=(const BorrowedList &) = delete;
    ~BorrowedList() {
        for (at::Tensor &tensor : list_) {
            (void)tensor.unsafeReleaseTensorImpl();
        }
    }
    at::TensorList operator*() const {
        return list_;
    }

  private:
    std::vector<at::Tensor> list_;
};

} // namespace

extern "C" {

int fct_foreach_copy(fct_tensor *const *dst, fct_tensor *const *src, size_t count) {
    return guarded("fct_foreach_copy", [&] {
        const BelowAutograd below_autograd;
        const BorrowedList to(dst, count);
        const BorrowedList from(src, count);
        const DeviceCall call(fct::impl(dst[0])->device_type());
        at::_foreach_copy_(*to, *from);
    });
}

int fct_foreach_add(fct_tensor *const *dst, fct_tensor *const *src, size_t count) {
    return guarded("fct_foreach_add", [&] {
        const BelowAutograd below_autograd;
        std::vector<at::Tensor> to;
        std::vector<at::Tensor> from;
        for (size_t i = 0; i < count; i++) {
            to.push_back(view_half_as_real(*Borrowed(dst[i])));
            from.push_back(view_half_as_real(*Borrowed(src[i])));
        }
        const DeviceCall call(fct::impl(dst[0])->device_type());
        at::_foreach_add_(to, from);
    });
}

int fct_split_copy(const fct_tensor *src, const int64_t *sizes, fct_tensor *const *out,
                   size_t count) {
    return guarded("fct_split_copy", [&] {
        const BelowAutograd below_autograd;
        const BorrowedList parts(out, count);
        const DeviceCall call(fct::impl(src)->device_type());
        at::split_with_sizes_copy_out(*parts, *Borrowed(src), c10::IntArrayRef(sizes, count), 1);
    });
}

int fct_chunk_cat(fct_tensor *const *tensors, size_t count, int64_t chunks, fct_tensor *out) {
    return guarded("fct_chunk_cat", [&] {
        const BelowAutograd below_autograd;
        const BorrowedList list(tensors, count);
        Borrowed result(out);
        const DeviceCall call(fct::impl(out)->device_type());
        at::_chunk_cat_out(*result, *list, 0, chunks);
    });
}

} // extern "C"
