// The fields of a struct of arguments, described where they are declared: each params.h uses these
// macros, and each kernel library exports the table that they make. ostinato._C packs the arguments
// of a launch by that table, so a field is written nowhere else. Plain C++17.
//
//   struct EmbedParams {
//     OSTINATO_FIELDS_BEGIN(EmbedParams)
//     OSTINATO_FIELD(const int64_t*, tokens)  // every launch must pass it
//     OSTINATO_OPTIONAL(int32_t, pdl)         // zero or null where it is not passed
//     OSTINATO_FIELDS_END()
//   };
//
// The macros add static functions only: the struct stays trivial, with the members in this order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace ostinato {

// The version of the two structs below. Raise it when they change: ostinato._C refuses others.
constexpr uint32_t kFieldTableFormat = 1;

struct Field {
  const char* name;
  // A letter for each number of the field, naturally aligned: p an address, q int64_t, i int32_t,
  // I uint32_t, f float. More than one are passed as one tuple.
  const char* kind;
  uint32_t offset;
  uint32_t size;
  uint32_t required;  // 0 or 1
};

struct FieldTable {
  uint32_t format;  // first in every version
  uint32_t size;    // of the struct
  uint32_t count;
  const Field* fields;
};

// The kind of a type, given as a pointer to it. Types of several numbers have an overload beside
// them.
template <typename T>
constexpr const char* kind_of(T* const*) {
  return "p";
}
constexpr const char* kind_of(const int64_t*) { return "q"; }
constexpr const char* kind_of(const int32_t*) { return "i"; }
constexpr const char* kind_of(const uint32_t*) { return "I"; }
constexpr const char* kind_of(const float*) { return "f"; }

// The size of one number of a kind; 0 for letters that are none.
constexpr std::size_t size_of_number(char letter) {
  return letter == 'p' || letter == 'q'                    ? 8
         : letter == 'i' || letter == 'I' || letter == 'f' ? 4
                                                           : 0;
}

// The size of a struct of these numbers.
constexpr std::size_t size_of_kind(const char* kind) {
  std::size_t size = 0;
  std::size_t alignment = 1;
  for (; *kind != '\0'; ++kind) {
    const std::size_t number = size_of_number(*kind);
    if (number == 0) {
      return 0;
    }
    size = (size + number - 1) / number * number + number;
    alignment = number > alignment ? number : alignment;
  }
  return (size + alignment - 1) / alignment * alignment;
}

template <int N>
using FieldIndex = std::integral_constant<int, N>;

template <typename T>
constexpr Field describe(const char* name, std::size_t offset, bool required) {
  constexpr const char* kKind = kind_of(static_cast<const T*>(nullptr));
  static_assert(size_of_kind(kKind) == sizeof(T), "kind_of() does not fit the type of this field");
  return {name, kKind, static_cast<uint32_t>(offset), sizeof(T), required};
}

template <typename Params, int... N>
const FieldTable* make_field_table(std::integer_sequence<int, N...>) {
  // A struct without fields needs an array, too.
  static constexpr Field kFields[] = {Params::describe_field(FieldIndex<N>())...,
                                      Field{nullptr, nullptr, 0, 0, 0}};
  static constexpr FieldTable kTable = {kFieldTableFormat, sizeof(Params), sizeof...(N), kFields};
  return &kTable;
}

template <typename Params>
const FieldTable* field_table() {
  static_assert(std::is_trivial_v<Params> && std::is_standard_layout_v<Params>,
                "arguments of a launch are copied byte by byte");
  return make_field_table<Params>(std::make_integer_sequence<int, Params::field_count()>());
}

}  // namespace ostinato

#define OSTINATO_FIELDS_BEGIN(Params) \
  using Described = Params;           \
  enum : int { kFieldsBegin = __COUNTER__ };

#define OSTINATO_DESCRIBED_FIELD(Type, name, required)                                       \
  Type name;                                                                                 \
  static constexpr ::ostinato::Field describe_field(                                         \
      ::ostinato::FieldIndex<__COUNTER__ - kFieldsBegin - 1>) {                              \
    return ::ostinato::describe<decltype(name)>(#name, offsetof(Described, name), required); \
  }
#define OSTINATO_FIELD(Type, name) OSTINATO_DESCRIBED_FIELD(Type, name, true)
#define OSTINATO_OPTIONAL(Type, name) OSTINATO_DESCRIBED_FIELD(Type, name, false)

#define OSTINATO_FIELDS_END() \
  static constexpr int field_count() { return __COUNTER__ - kFieldsBegin - 1; }
