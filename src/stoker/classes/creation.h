// What is known of an object when it is made, before anything was done with it: its name, the size
// that was announced, and what the objects of its folder did.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "stoker/classes/class.h"

namespace stoker {

inline constexpr std::array<std::string_view, 10> kCreationFeatureNames = {
    // 1 where its name says so (creation.cc has the words; the last one counts, of its folders'
    // names too), else 0
    "name_data", "name_saved", "name_log", "name_state",
    "digits",     // in the last part of its name: it is one of a series
    "log_bytes",  // log2(1 + bytes announced); 0: it is to grow
    // share of what its folder's objects did, window by window, and were stated to be for
    "folder_read_only", "folder_write_only", "folder_read_write",
    "log_folder",  // log2(1 + how often that is known)
};
using CreationFeatures = std::array<float, kCreationFeatureNames.size()>;

// How often the objects of a folder did what, by class; what is older counts less.
using FolderHistory = std::array<float, kClasses.size()>;
void add_to(FolderHistory& history, Class did);

CreationFeatures creation_features(std::string_view key, uint64_t bytes,
                                   const FolderHistory& folder);
// Whether name or folder tell anything; a size alone does not.
bool tells_of_use(const CreationFeatures& known);

}  // namespace stoker
