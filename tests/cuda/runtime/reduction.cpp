#include "reduction.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cast.h"

namespace sim {

namespace {

struct Half {
    uint16_t bits;
    using Wide = float;
    static float widen(Half value) {
        return fck_float_of_half(value.bits);
    }
    static Half narrow(float value) {
        return {fck_half_of_float(value)};
    }
};

struct Bfloat16 {
    uint16_t bits;
    using Wide = float;
    static float widen(Bfloat16 value) {
        return fck_float_of_bfloat16(value.bits);
    }
    static Bfloat16 narrow(float value) {
        return {fck_bfloat16_of_float(value)};
    }
};

template <class T> struct Plain {
    using Wide = T;
    static T widen(T value) {
        return value;
    }
    static T narrow(T value) {
        return value;
    }
};

template <class Wide> Wide combine(ncclRedOp_t op, Wide a, Wide b) {
    switch (op) {
    case ncclProd:
        return static_cast<Wide>(a * b);
    case ncclMax:
        return std::max(a, b);
    case ncclMin:
        return std::min(a, b);
    default:
        return static_cast<Wide>(a + b);
    }
}

/* Calls `function` with a value of the element type and the rules of its arithmetic. The rules
 * convert elements to the type of the arithmetic and back. */
template <class Function> void with_type(ncclDataType_t type, Function function) {
    switch (type) {
    case ncclInt8:
        return function(int8_t{}, Plain<int8_t>{});
    case ncclUint8:
        return function(uint8_t{}, Plain<uint8_t>{});
    case ncclInt32:
        return function(int32_t{}, Plain<int32_t>{});
    case ncclUint32:
        return function(uint32_t{}, Plain<uint32_t>{});
    case ncclInt64:
        return function(int64_t{}, Plain<int64_t>{});
    case ncclUint64:
        return function(uint64_t{}, Plain<uint64_t>{});
    case ncclFloat16:
        return function(Half{}, Half{});
    case ncclBfloat16:
        return function(Bfloat16{}, Bfloat16{});
    case ncclFloat32:
        return function(float{}, Plain<float>{});
    case ncclFloat64:
        return function(double{}, Plain<double>{});
    default:
        return;
    }
}

} // namespace

size_t size_of(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    default:
        return 8;
    }
}

double read_scalar(ncclDataType_t type, const void *scalar) {
    double value = 0;
    with_type(type, [&](auto element, auto rules) {
        using T = decltype(element);
        value = static_cast<double>(decltype(rules)::widen(*static_cast<const T *>(scalar)));
    });
    return value;
}

void scale(ncclDataType_t type, void *data, size_t count, double factor) {
    with_type(type, [&](auto element, auto rules) {
        using T = decltype(element);
        using Rules = decltype(rules);
        using Wide = typename Rules::Wide;
        auto *const items = static_cast<T *>(data);
        for (size_t i = 0; i < count; i++) {
            const Wide wide = Rules::widen(items[i]);
            items[i] = Rules::narrow(static_cast<Wide>(wide * static_cast<Wide>(factor)));
        }
    });
}

void divide_integers(ncclDataType_t type, void *data, size_t count, size_t world) {
    with_type(type, [&](auto element, auto) {
        using T = decltype(element);
        if constexpr (std::is_integral_v<T>) {
            auto *const items = static_cast<T *>(data);
            for (size_t i = 0; i < count; i++) {
                items[i] = static_cast<T>(items[i] / static_cast<T>(world));
            }
        }
    });
}

void reduce(ncclDataType_t type, ncclRedOp_t op, const std::vector<const void *> &inputs,
            void *result, size_t count) {
    with_type(type, [&](auto element, auto rules) {
        using T = decltype(element);
        using Rules = decltype(rules);
        using Wide = typename Rules::Wide;
        for (size_t i = 0; i < count; i++) {
            T sum = static_cast<const T *>(inputs[0])[i];
            for (size_t rank = 1; rank < inputs.size(); rank++) {
                const T item = static_cast<const T *>(inputs[rank])[i];
                sum = Rules::narrow(combine<Wide>(op, Rules::widen(sum), Rules::widen(item)));
            }
            static_cast<T *>(result)[i] = sum;
        }
    });
}

} // namespace sim
