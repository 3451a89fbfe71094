// libnvrtc: translates a kernel of CubeCL's from CUDA C++ to C++ and compiles it with g++.
//
// "PTX" is the path of a shared library. What has been compiled once is kept in the folder
// `CUDA_ON_CPU_CACHE`, beside its source.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace {

struct Program {
    std::string source, ptx, log;
};

// The folder of this library.
std::string home() {
    Dl_info info{};
    dladdr(reinterpret_cast<void *>(&home), &info);
    std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

// Parts of `text` between `separator`s that are in no bracket and no string.
std::vector<std::string> split(const std::string &text, char separator) {
    std::vector<std::string> parts(1);
    int depth = 0;
    bool quoted = false;
    for (size_t i = 0; i < text.size(); i++) {
        char c = text[i];
        if (quoted && c == '\\') {
            parts.back() += c;
            parts.back() += text[++i];
            continue;
        }
        if (c == '"') quoted = !quoted;
        if (!quoted && (c == '(' || c == '[' || c == '{')) depth++;
        if (!quoted && (c == ')' || c == ']' || c == '}')) depth--;
        if (!quoted && depth == 0 && c == separator) parts.emplace_back();
        else parts.back() += c;
    }
    return parts;
}

// The expressions of operands as `"=f"(a), "r"(b)`.
std::vector<std::string> operands(const std::string &text) {
    std::vector<std::string> found;
    for (const std::string &part : split(text, ',')) {
        size_t open = part.find('('), close = part.rfind(')');
        if (open != std::string::npos) found.push_back(part.substr(open + 1, close - open - 1));
    }
    return found;
}

std::string join(const std::vector<std::string> &parts) {
    std::string out;
    for (const std::string &part : parts) out += ", " + part;
    return out;
}

// A call that does what one inline assembly does; empty where there is none.
std::string call_of(const std::string &ptx, std::vector<std::string> out,
                    std::vector<std::string> in) {
    std::smatch m;
    auto is = [&](const char *pattern) { return std::regex_search(ptx, m, std::regex(pattern)); };
    auto all = join(out) + join(in);
    if (is(R"(mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32)"))
        return "emu_mma<emu_from_" + std::string(m[1] == "bf16" ? "bf16" : "half") +
               ">(EMU_SITE" + all + ")";
    if (is(R"(ldmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.)"))
        return "emu_ldmatrix<" + m[1].str() + ", " + (m[2].matched ? "true" : "false") +
               ">(EMU_SITE" + join(in) + join(out) + ")";
    if (is(R"(stmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.)"))
        return "emu_stmatrix<" + m[1].str() + ", " + (m[2].matched ? "true" : "false") +
               ">(EMU_SITE" + all + ")";
    if (is(R"(cp\.async\.commit_group)")) return "emu_copy_commit()";
    if (is(R"(cp\.async\.wait_group (\d+))")) return "emu_copy_wait(" + m[1].str() + ")";
    if (is(R"(cp\.async\.wait_all)")) return "(emu_copy_commit(), emu_copy_wait(0))";
    if (is(R"(cp\.async\.c[ag]\.shared(::cta)?\.global[^;]*\], (\d+))"))
        return "emu_ptx_copy(" + m[2].str() + all + ")";
    if (is(R"(elect\.sync)")) return "emu_ptx_elect(EMU_SITE" + all + ")";
    if (is(R"(atom\.[a-z.]*add)")) return "emu_ptx_atom_add(EMU_SITE" + all + ")";
    if (is(R"((max|min)\.NaN\.f32)"))
        return "emu_ptx_" + m[1].str() + "_nan(EMU_SITE" + all + ")";
    if (is(R"((ex2|tanh|rcp)\.approx)")) return "emu_ptx_" + m[1].str() + "(EMU_SITE" + all + ")";
    return "";
}

std::string translated(const std::string &source, std::string &log) {
    std::string out;
    const std::regex assembly(R"(\basm\b\s*(volatile)?\s*\()");
    auto at = source.cbegin();
    std::smatch m;
    while (std::regex_search(at, source.cend(), m, assembly)) {
        out.append(at, m[0].first);
        auto open = m[0].second, end = open;
        int depth = 1;
        for (bool quoted = false; depth; end++) {
            if (quoted && *end == '\\') end++;
            else if (*end == '"') quoted = !quoted;
            else if (!quoted && *end == '(') depth++;
            else if (!quoted && *end == ')') depth--;
        }
        // "ptx" : outputs : inputs : clobbers
        auto parts = split(std::string(open, end - 1), ':');
        parts.resize(4);
        std::string call = call_of(parts[0], operands(parts[1]), operands(parts[2]));
        if (call.empty()) log += "cuda-on-cpu knows no inline assembly " + parts[0] + "\n";
        out += call;
        at = end;
    }
    out.append(at, source.cend());
    out = std::regex_replace(
        out, std::regex(R"(extern __shared__ (__align__\(\d+\) )?char (\w+)\[\];)"),
        "char *const $2 = emu_shared();");
    std::string entries;
    const std::regex kernel(R"(__global__ void __launch_bounds__\([^)]*\)[^\n(]*?(\w+)\()");
    for (std::sregex_iterator k(out.begin(), out.end(), kernel), none; k != none; ++k)
        entries += "extern \"C\" void emu_entry_" + (*k)[1].str() +
                   "(void **arguments) { emu_call(&" + (*k)[1].str() + ", arguments); }\n";
    if (entries.empty()) log += "cuda-on-cpu found no kernel in the source\n";
    return "#include \"device.hpp\"\n" + out + "\n" + entries;
}

std::string text_of(const std::string &path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

int compile(Program &program) {
    const char *kept = getenv("CUDA_ON_CPU_CACHE");
    std::string folder = kept ? kept : home() + "/kernels", include = home() + "/include";
    mkdir(folder.c_str(), 0777);
    char name[32];
    snprintf(name, sizeof name, "/%016zx",
             std::hash<std::string>()(program.source + text_of(include + "/device.hpp")));
    std::string path = folder + name;
    program.ptx = path + ".so";
    if (access(program.ptx.c_str(), R_OK) == 0) return 0;
    std::string code = translated(program.source, program.log);
    if (!program.log.empty()) return 6;
    std::ofstream(path + ".cu") << program.source;
    std::ofstream(path + ".cpp") << code;
    std::string made = path + "." + std::to_string(getpid());
    std::string command = "g++ -std=c++20 -O1 -fno-strict-aliasing -ffp-contract=off -w -fPIC "
                          "-shared -I" + include + " -o " + made + " " + path + ".cpp -L" + home() +
                          " -l:libcuda.so.1 2> " + made + ".log";
    if (system(command.c_str()) != 0) {
        program.log = text_of(made + ".log");
        return 6;
    }
    remove((made + ".log").c_str());
    return rename(made.c_str(), program.ptx.c_str()) == 0 ? 0 : 6;
}

} // namespace

extern "C" {
int nvrtcCreateProgram(Program **program, const char *source, const char *, int, const char **,
                       const char **) {
    *program = new Program{source, "", ""};
    return 0;
}
int nvrtcDestroyProgram(Program **program) {
    delete *program;
    *program = nullptr;
    return 0;
}
int nvrtcCompileProgram(Program *program, int, const char **) { return compile(*program); }
int nvrtcGetPTXSize(Program *program, size_t *size) {
    *size = program->ptx.size() + 1;
    return 0;
}
int nvrtcGetPTX(Program *program, char *ptx) {
    strcpy(ptx, program->ptx.c_str());
    return 0;
}
int nvrtcGetProgramLogSize(Program *program, size_t *size) {
    *size = program->log.size() + 1;
    return 0;
}
int nvrtcGetProgramLog(Program *program, char *log) {
    strcpy(log, program->log.c_str());
    return 0;
}
const char *nvrtcGetErrorString(int) { return "cuda-on-cpu: see the log"; }
int nvrtcVersion(int *major, int *minor) {
    *major = 13, *minor = 0;
    return 0;
}
}
