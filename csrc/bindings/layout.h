// The layout of a struct that a kernel library takes, read from the table that the library exports
// and checked: what is wrong with it is an error that names the library, before any launch.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/fields.h"

namespace ostinato {

struct Number {
  char kind;  // as of Field
  uint32_t offset;
};

struct LayoutField {
  std::string name;
  std::string kind;
  bool required;
  std::vector<Number> numbers;
};

struct Layout {
  // A kernel's arguments have room for 4 KB.
  static constexpr uint32_t kMaxSize = 4096;

  uint32_t size = 0;
  std::vector<LayoutField> fields;

  const LayoutField* find(const std::string& name) const {
    for (const LayoutField& field : fields) {
      if (field.name == name) {
        return &field;
      }
    }
    return nullptr;
  }
};

[[noreturn]] inline void refuse(const std::string& path, const std::string& why) {
  throw std::runtime_error(path + ": " + why +
                           "; this library and ostinato._C are of different versions: reinstall "
                           "the package (`pip install -e .` in a checkout), then build the kernel "
                           "again (`python -m ostinato build`)");
}

// `reserved` is a name that no field may have.
inline Layout read_layout(const std::string& path, const FieldTable* table,
                          const std::string& reserved) {
  if (table == nullptr || table->format != kFieldTableFormat) {
    const std::string got = table == nullptr ? "no table" : std::to_string(table->format);
    refuse(path,
           "format of its fields: got " + got + ", expected " + std::to_string(kFieldTableFormat));
  }
  if (table->size > Layout::kMaxSize) {
    refuse(path, "size of its struct: got " + std::to_string(table->size) +
                     " bytes, expected at most " + std::to_string(Layout::kMaxSize));
  }
  Layout layout;
  layout.size = table->size;
  std::vector<bool> taken(table->size);
  for (uint32_t i = 0; i < table->count; ++i) {
    const Field& field = table->fields[i];
    const std::string name = field.name;
    const std::size_t size = size_of_kind(field.kind);
    if (name == reserved || layout.find(name) != nullptr) {
      refuse(path, "field " + name + ": this name is taken");
    }
    if (size == 0 || size != field.size) {
      refuse(path, "field " + name + ": got kind '" + field.kind + "' of " +
                       std::to_string(field.size) + " bytes, expected letters of p, q, i, I and f");
    }
    if (field.offset > table->size || size > table->size - field.offset) {
      refuse(path, "field " + name + ": ends outside of its struct of " +
                       std::to_string(table->size) + " bytes");
    }
    LayoutField made = {name, field.kind, field.required != 0, {}};
    uint32_t offset = field.offset;
    const bool has_wide = made.kind.find_first_of("pq") != std::string::npos;
    if (offset % (has_wide ? 8 : 4) != 0) {
      refuse(path, "field " + name + ": got offset " + std::to_string(offset) +
                       ", expected a multiple of its alignment");
    }
    for (const char kind : made.kind) {
      const uint32_t number = static_cast<uint32_t>(size_of_number(kind));
      offset = (offset + number - 1) / number * number;
      for (uint32_t byte = offset; byte < offset + number; ++byte) {
        if (byte >= table->size || taken[byte]) {
          refuse(path, "field " + name + ": overlaps another field");
        }
        taken[byte] = true;
      }
      made.numbers.push_back({kind, offset});
      offset += number;
    }
    layout.fields.push_back(made);
  }
  return layout;
}

}  // namespace ostinato
