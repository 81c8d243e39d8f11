package extevict_test

import (
	"flag"
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	// So that go test's cache knows what the test depends on.
	_ "github.com/extevict/extevict/abort"
	_ "github.com/extevict/extevict/evictor"
	_ "github.com/extevict/extevict/extproc"
	_ "github.com/extevict/extevict/extproc/extproctest"
	_ "github.com/extevict/extevict/flowcontrol"
)

var update = flag.Bool("update", false, "write testdata/api.txt as the API is")

// TestAPI compares what the module exports with testdata/api.txt, so that whoever reads a
// change to the code sees what it does to the API. Run with -update it writes that file.
func TestAPI(t *testing.T) {
	const golden = "testdata/api.txt"
	packages := []string{"abort", "evictor", "extproc", "extproc/extproctest", "flowcontrol"}
	args := []string{"-export", "-deps", "-f", "{{if .Export}}{{.ImportPath}} {{.Export}}{{end}}"}
	for _, p := range packages {
		args = append(args, "./"+p)
	}
	exports := map[string]string{} // the compiler's, by import path
	for words := list(t, args...); len(words) > 1; words = words[2:] {
		exports[words[0]] = words[1]
	}
	imp := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	})
	var text strings.Builder
	for _, p := range packages {
		pkg, err := imp.Import(module + "/" + p)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&text, "%s\n", p)
		for _, l := range api(pkg) {
			fmt.Fprintf(&text, "\t%s\n", l)
		}
	}
	got := text.String()
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o666); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); d != "" {
		t.Errorf("the exported API has changed; if that is meant, say so in CHANGELOG.md and run go test -run TestAPI . -update (-want +got):\n%s", d)
	}
}

// api returns a line for each constant, variable, function, type, field and method that
// pkg exports, methods that come from embedded types included.
func api(pkg *types.Package) (lines []string) {
	short := func(p *types.Package) string {
		if p == pkg {
			return ""
		}
		return p.Name()
	}
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	signature := func(o types.Object) string {
		return strings.TrimPrefix(types.TypeString(o.Type(), short), "func")
	}
	for _, name := range pkg.Scope().Names() {
		o := pkg.Scope().Lookup(name)
		if !o.Exported() {
			continue
		}
		switch o := o.(type) {
		case *types.Const:
			add("const %s %s = %s", name, types.TypeString(o.Type(), short), o.Val().ExactString())
		case *types.Var:
			add("var %s %s", name, types.TypeString(o.Type(), short))
		case *types.Func:
			add("func %s%s", name, signature(o))
		case *types.TypeName:
			if o.IsAlias() {
				add("type %s = %s", name, types.TypeString(types.Unalias(o.Type()), short))
				continue
			}
			switch u := o.Type().Underlying().(type) {
			case *types.Struct:
				add("type %s struct", name)
				for f := range u.Fields() {
					if f.Exported() {
						add("type %s struct, %s %s", name, f.Name(), types.TypeString(f.Type(), short))
					}
				}
			case *types.Interface:
				add("type %s interface", name)
				for m := range u.Methods() {
					add("type %s interface, %s%s", name, m.Name(), signature(m))
				}
				continue
			default:
				add("type %s %s", name, types.TypeString(u, short))
			}
			values := types.NewMethodSet(o.Type())
			for s := range types.NewMethodSet(types.NewPointer(o.Type())).Methods() {
				m := s.Obj()
				if !m.Exported() {
					continue
				}
				star := "*"
				if values.Lookup(m.Pkg(), m.Name()) != nil {
					star = ""
				}
				add("method (%s%s) %s%s", star, name, m.Name(), signature(m))
			}
		}
	}
	slices.Sort(lines)
	return lines
}
