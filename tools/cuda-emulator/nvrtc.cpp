// libnvrtc: translates a kernel of CubeCL's from CUDA C++ to C++ and compiles it with g++.
//
// "PTX" is the path of a shared library. What has been compiled once is kept in the folder
// `CUDA_EMULATOR_CACHE`, beside its source.
#include <algorithm>
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

// What an array has, written to each of these.
std::string assigned(const std::vector<std::string> &to, const std::string &from) {
    std::string code;
    for (size_t i = 0; i < to.size(); i++) code += to[i] + " = " + from + "[" + std::to_string(i) + "]; ";
    return code;
}

// Chains of products on four warps, whose operands go by the numbers of registers: the result's first.
// Each warp has 16 rows and its part of the work is its own.
std::string wgmma_of(const std::string &ptx, const std::vector<std::string> &out,
                     const std::vector<std::string> &in) {
    const std::regex product(
        R"((add\.s64 a, %(\d+), (\d+);\\n)?add\.s64 b, %(\d+), (\d+);\\n)"
        R"(wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\7 \{%(\d+)[^}]*\}, )"
        R"((a|\{%(\d+)[^}]*\}), b, ([01]), 1, 1(, 0)?, ([01]);)");
    std::vector<std::string> descriptors, words, sums(out.size(), "0");
    auto place = [](std::vector<std::string> &all, const std::string &one) {
        size_t at = std::find(all.begin(), all.end(), one) - all.begin();
        if (at == all.size()) all.push_back(one);
        return std::to_string(at);
    };
    auto input = [&](const std::string &number, unsigned ahead = 0) {
        return in.at(stoul(number) + ahead - out.size());
    };
    std::string products, columns, type;
    unsigned count = 0, written = 0;
    for (std::sregex_iterator p(ptx.begin(), ptx.end(), product), none; p != none; ++p, count++) {
        const std::smatch &m = *p;
        bool in_registers = m[10].matched;
        products += "{" + m[8].str() + ", ";
        products += in_registers ? std::to_string(words.size()) + ", 0, 0, "
                                 : "-1, " + place(descriptors, input(m[2])) + ", " + m[3].str() + ", ";
        for (unsigned i = 0; in_registers && i < 4; i++) words.push_back(input(m[10], i));
        products += place(descriptors, input(m[4])) + ", " + m[5].str() + ", " + m[11].str() + ", " +
                    m[13].str() + "}, ";
        columns = m[6], type = m[7] == "bf16" ? "bf16" : "half";
        written = std::max<unsigned>(written, stoul(m[8]) + stoul(columns) / 2);
    }
    const std::regex move(R"(mov\.f32 %(\d+), %(\d+);)");
    for (std::sregex_iterator p(ptx.begin(), ptx.end(), move), none; p != none; ++p)
        sums.at(stoul((*p)[1])) = input((*p)[2]);
    size_t instructions = 0;
    for (size_t at = ptx.find("mma_async"); at != ptx.npos; at = ptx.find("mma_async", at + 1))
        instructions++;
    if (!count || count != instructions || written > out.size() || descriptors.size() > 4) return "";
    words.push_back("0");
    auto all = [](const std::vector<std::string> &parts) { return "{" + join(parts).substr(2) + "}"; };
    std::string call = "[&] { static const EmuProduct products[] = {" + products + "}; float sums[] = " +
                       all(sums) + "; unsigned words[] = " + all(words) + "; EmuWgmma in{products, " +
                       std::to_string(count) + ", " + columns + ", " + std::to_string(out.size()) +
                       ", sums, " + all(descriptors) + ", words}; float found[" +
                       std::to_string(out.size()) +
                       "]; emu_sync_warp(EMU_SITE, &in, found, EmuWgmmaWork<emu_from_" + type +
                       ">::work);";
    return call + assigned(out, "found") + "}()";
}

// A whole loop of copies and products, instruction by instruction. Operands go by the numbers of registers, the
// result's first; it has registers and one label of its own. Products are made when they are asked for.
std::string loop_of(const std::string &ptx, const std::vector<std::string> &out,
                    const std::vector<std::string> &in) {
    std::string code = "[&] { ";
    auto value = [&](const std::string &name) {
        if (name[0] != '%') return name;
        size_t number = stoul(name.substr(1));
        return number < out.size() ? out[number] : in.at(number - out.size());
    };
    const std::string a = R"(([\w%]+))", next = R"(, ([\w%]+))";
    const std::vector<std::pair<std::regex, std::function<std::string(const std::smatch &)>>> known = {
        {std::regex(R"(\{|\}|(fence\.proxy|wgmma\.(fence|commit_group|wait_group)).*)"),
         [](const std::smatch &) { return ""; }},
        {std::regex(R"(\.reg \.(pred|b32|b64) (.*))"),
         [](const std::smatch &m) {
             std::string type = m[1] == "pred" ? "bool " : m[1] == "b32" ? "unsigned " : "unsigned long long ";
             return type + m[2].str() + ";";
         }},
        {std::regex("mov\\.f32 " + a + ", 0f00000000"),
         [&](const std::smatch &m) { return value(m[1]) + " = 0;"; }},
        {std::regex("mov\\.b(?:32|64) " + a + next),
         [&](const std::smatch &m) { return value(m[1]) + " = " + value(m[2]) + ";"; }},
        {std::regex("setp\\.gt\\.s32 " + a + next + next),
         [&](const std::smatch &m) {
             return value(m[1]) + " = int(" + value(m[2]) + ") > int(" + value(m[3]) + ");";
         }},
        {std::regex("setp\\.eq\\.u32 " + a + next + next),
         [&](const std::smatch &m) {
             return value(m[1]) + " = " + value(m[2]) + " == " + value(m[3]) + ";";
         }},
        {std::regex("selp\\.b32 " + a + next + next + next),
         [&](const std::smatch &m) {
             return value(m[1]) + " = " + value(m[4]) + " ? " + value(m[2]) + " : " + value(m[3]) + ";";
         }},
        {std::regex("(add|sub)\\.[su](?:32|64) " + a + next + next),
         [&](const std::smatch &m) {
             return value(m[2]) + " = " + value(m[3]) + (m[1] == "add" ? " + " : " - ") + value(m[4]) + ";";
         }},
        {std::regex("shr\\.s32 " + a + next + next),
         [&](const std::smatch &m) {
             return value(m[1]) + " = int(" + value(m[2]) + ") >> " + value(m[3]) + ";";
         }},
        {std::regex(R"(cp\.async\.cg\.shared\.global \[(\w+)\+(\d+)\], \[(\w+)\], (\d+), (\w+))"),
         [](const std::smatch &m) {
             return "emu_copy_async(emu_shared() + " + m[1].str() + " + " + m[2].str() + ", (const void *)" +
                    m[3].str() + ", " + m[4].str() + ", " + m[5].str() + ");";
         }},
        {std::regex(R"(cp\.async\.commit_group)"), [](const std::smatch &) { return "emu_copy_commit();"; }},
        {std::regex(R"(cp\.async\.wait_group (\d+))"),
         [](const std::smatch &m) { return "emu_copy_wait(" + m[1].str() + ");"; }},
        {std::regex(R"(bar\.sync 0)"), [](const std::smatch &) { return "__syncthreads();"; }},
        {std::regex(R"((\w+):)"), [](const std::smatch &m) { return m[1].str() + ":;"; }},
        {std::regex(R"(bra (\w+))"), [](const std::smatch &m) { return "goto " + m[1].str() + ";"; }},
        {std::regex(R"(wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2 \{%0,[^}]*\}, (\w+), )"
                    R"((\w+), 1, 1, 1, ([01]), ([01]))"),
         [&](const std::smatch &m) {
             std::string count = std::to_string(out.size()), type = m[2] == "bf16" ? "bf16" : "half";
             return "{ static const EmuProduct product[] = {{0, -1, 0, 0, 1, 0, 1, " + m[6].str() + ", " +
                    m[5].str() + "}}; float sums[] = {" + join(out).substr(2) + "}; unsigned none[] = {0}; "
                    "EmuWgmma in{product, 1, " + m[1].str() + ", " + count + ", sums, {" + m[3].str() + ", " +
                    m[4].str() + "}, none}; float found[" + count +
                    "]; emu_sync_warp(EMU_SITE, &in, found, EmuWgmmaWork<emu_from_" + type + ">::work); " +
                    assigned(out, "found") + "}";
         }},
    };
    std::string text = std::regex_replace(ptx, std::regex(R"(\\n|")"), "\n");
    std::istringstream lines(text.substr(0, text.find("//")));
    for (std::string line; std::getline(lines, line);) {
        // A label, a register's declaration or an instruction, which may have a condition.
        std::smatch m;
        std::regex_match(line, m, std::regex(R"(\s*(@(\w+) )?(.*?);?\s*)"));
        std::string statement = m[3], condition = m[2];
        if (statement.empty()) continue;
        auto fits = [&](const auto &one) { return std::regex_match(statement, m, one.first); };
        auto one = std::find_if(known.begin(), known.end(), fits);
        if (one == known.end()) return "";
        std::string done = one->second(m);
        code += condition.empty() ? done + " " : "if (" + condition + ") { " + done + " } ";
    }
    return code + "}()";
}

// Waits for products, and hands on what they wrote: they were made when they were asked for.
std::string moves_of(const std::string &ptx, const std::vector<std::string> &out,
                     const std::vector<std::string> &in) {
    const std::regex move(R"(mov\.f32 %(\d+), %(\d+);)");
    std::string call = "[&] {";
    for (std::sregex_iterator p(ptx.begin(), ptx.end(), move), none; p != none; ++p)
        call += " " + out.at(stoul((*p)[1])) + " = " + in.at(stoul((*p)[2]) - out.size()) + ";";
    return call + " }()";
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
    if (is(R"(\bbra )")) return loop_of(ptx, out, in);
    if (is(R"(ld\.global\.v4\.f32 \{%0, %1, %2, %3\}, \[%4\];)")) {
        std::string reads;
        for (int i = 0; i < 4; i++)
            reads += (i ? ", " : "(") + out[i] + " = ((const float *)" + in[0] + ")[" + std::to_string(i) + "]";
        return reads + ")";
    }
    if (is(R"(st\.global\.v4\.f32 \[%0\], \{%1, %2, %3, %4\};)") ||
        is(R"(cvt\.rn\.(bf16|f16)x2\.f32 first, %2, %1;)")) {
        bool narrow = m.size() > 1;
        std::string to = !narrow ? "" : m[1] == "bf16" ? "emu_to_bf16" : "emu_to_half";
        std::string writes;
        for (int i = 0; i < 4; i++)
            writes += (i ? ", " : "(") + std::string(narrow ? "((unsigned short *)" : "((float *)") + in[0] + ")[" +
                      std::to_string(i) + "] = " + to + "(" + in[i + 1] + ")";
        return writes + ")";
    }
    if (is(R"(st\.global\.v2\.f32 \[%0\], \{%1, %2\};)"))
        return "(((float *)" + in[0] + ")[0] = " + in[1] + ", ((float *)" + in[0] + ")[1] = " + in[2] + ")";
    if (is(R"(red\.global\.add\.v2\.f32 \[%0\], \{%1, %2\};)"))
        return "(((float *)" + in[0] + ")[0] += " + in[1] + ", ((float *)" + in[0] + ")[1] += " + in[2] + ")";
    if (is(R"(^\s*"prefetch\.global)")) return "(void)0";
    if (is(R"(^\s*"mov\.b64 %0, %1;"\s*$)")) return "(" + out[0] + " = (unsigned long long)(" + in[0] + "))";
    if (is(R"(wgmma\.mma_async)")) return wgmma_of(ptx, out, in);
    if (is(R"(wgmma\.wait_group)")) return moves_of(ptx, out, in);
    if (is(R"(fence\.proxy\.async)")) return "(void)0";
    if (is(R"(cvta\.to\.shared\.u64)"))
        return "(" + out[0] + " = __cvta_generic_to_shared(" + in[0] + "))";
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
    if (is(R"(cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32 low, %(\d), %(\d);.*\.\1x2\.f32 high, %(\d), %(\d);)")) {
        std::string call = "(" + out[0] + " = emu_to_fp8x4<" + (m[1] == "e4m3" ? "3" : "2") + ">(";
        for (int i : {3, 2, 5, 4}) call += (i == 3 ? "" : ", ") + in.at(stoul(m[i]) - 1);
        return call + "))";
    }
    if (is(R"(elect\.sync)")) return "emu_ptx_elect(EMU_SITE" + all + ")";
    if (is(R"(atom\.[a-z.]*(add|max))")) return "emu_ptx_atom_" + m[1].str() + "(EMU_SITE" + all + ")";
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
        if (call.empty()) log += "cuda-emulator knows no inline assembly " + parts[0] + "\n";
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
    if (entries.empty()) log += "cuda-emulator found no kernel in the source\n";
    return "#include \"device.hpp\"\n" + out + "\n" + entries;
}

std::string text_of(const std::string &path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

int compile(Program &program) {
    const char *kept = getenv("CUDA_EMULATOR_CACHE");
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
const char *nvrtcGetErrorString(int) { return "cuda-emulator: see the log"; }
int nvrtcVersion(int *major, int *minor) {
    *major = 13, *minor = 0;
    return 0;
}
}
