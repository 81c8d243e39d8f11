package envoy_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/types/known/structpb"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/extevict/extevict/internal/envoy"
)

// read returns the body of a response.
func read(resp *http.Response, err error) (string, error) {
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

// TestRequests sends requests from HTTP/1.1 and HTTP/2 clients to HTTP/1.1 and HTTP/2
// upstreams, which are configured or picked, and finds each in the access log.
func TestRequests(t *testing.T) {
	long := strings.Repeat("x", 4000)
	ids := []struct{ sent, logged string }{
		{"", ""},
		{"a", "a"},
		{"a", "a"}, // two streams with one id
		{"7b9f0c4e-3f0a-4e61-9c1b-0d3a5c1e2f10", "7b9f0c4e-3f0a-4e61-9c1b-0d3a5c1e2f10"},
		{`{"no": uuid}; or = 1`, `{"no": uuid}; or = 1`},
		{"größe", "größe"},
		{"ö gr\xf6\xdfe\t\x80", "Ã¶ größe\t\u0080"},
		{long, long},
	}
	for _, h2 := range []bool{false, true} {
		for _, upstreamH2 := range []bool{false, true} {
			for _, byHeader := range []bool{false, true} {
				t.Run(fmt.Sprintf("client h2=%v,upstream h2=%v,by header=%v", h2, upstreamH2, byHeader), func(t *testing.T) {
					upstream := serve(t, func(w http.ResponseWriter, r *http.Request) {
						b, _ := io.ReadAll(r.Body)
						w.Header().Set("Trailer", "X-End")
						w.(http.Flusher).Flush() // a content-length would leave no place for trailers
						fmt.Fprintf(w, "%s %s %s", r.Proto, b, r.Trailer.Get("x-begin"))
						w.Header().Set("X-End", "over")
					})
					seen := make(chan string, 1)
					addr := pick(t, func(header map[string]string) *extprocpb.ProcessingResponse {
						id, ok := header["x-request-id"]
						if !ok {
							id = "none"
						}
						seen <- id
						resp := goOn()
						if byHeader {
							resp = goOn(envoy.EndpointHeader, upstream)
						}
						resp.DynamicMetadata, _ = structpb.NewStruct(map[string]any{"picker": map[string]any{"length": len(id)}})
						return resp
					})
					c := envoy.Config{
						ExtProc: []envoy.ExtProc{{
							Address:             addr,
							Mode:                envoy.ProcessingMode{RequestTrailers: envoy.Send, ResponseTrailers: envoy.Send},
							ReceivingNamespaces: []string{"picker", "other"},
						}},
						Upstream: envoy.Upstream{HTTP2: upstreamH2, ByHeader: byHeader},
					}
					if !byHeader {
						c.Upstream.Endpoints = []string{upstream}
					}
					e := start(t, c)
					proto := map[bool]string{false: "HTTP/1.1", true: "HTTP/2"}
					wantBody := map[bool]string{false: "HTTP/1.1", true: "HTTP/2.0"}[upstreamH2] + " ping begun"
					cl := client(t, h2)
					var wants []envoy.Entry
					for i, id := range ids {
						req, err := http.NewRequestWithContext(t.Context(), "POST", e.URL()+"/v1?i=1", io.MultiReader(strings.NewReader("ping")))
						if err != nil {
							t.Fatal(err)
						}
						req.Trailer = http.Header{"X-Begin": {"begun"}}
						req.Header.Set(envoy.CaseHeader, fmt.Sprint(i))
						wantID := "none"
						if id.sent != "" {
							req.Header.Set("x-request-id", id.sent)
							wantID = id.sent
						}
						resp, err := cl.Do(req)
						body, err := read(resp, err)
						if err != nil {
							t.Fatal(err)
						}
						if body != wantBody || resp.Trailer.Get("x-end") != "over" {
							t.Errorf("body %q, trailer %v, want %q and X-End", body, resp.Trailer, wantBody)
						}
						if got := <-seen; got != wantID {
							t.Errorf("the ext_proc server saw the id %q, want %q", got, wantID)
						}
						want := envoy.Entry{
							RequestID: id.logged, Case: fmt.Sprint(i), Protocol: proto[h2], Method: "POST", Path: "/v1?i=1",
							Code: 200, Details: "via_upstream", Flags: "-", BytesSent: int64(len(wantBody)), UpstreamHost: upstream,
							Metadata: map[string]any{"picker": map[string]any{"length": float64(len(wantID))}, "other": nil},
						}
						got, err := await(t, e, func(got envoy.Entry) bool { return got.Case == want.Case })
						if err != nil {
							t.Fatal(err)
						}
						if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(envoy.Entry{}, "Duration")); diff != "" {
							t.Errorf("entry (-want +got):\n%s", diff)
						}
						wants = append(wants, got)
					}
					got, err := e.AccessLog()
					if err != nil {
						t.Fatal(err)
					}
					if diff := cmp.Diff(wants, got); diff != "" {
						t.Errorf("access log (-awaited +all):\n%s", diff)
					}
					stats, err := e.Stats(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					for _, name := range []string{"http.ingress.downstream_rq_2xx", "http.ingress.ext_proc.streams_started", "cluster.upstream.upstream_rq_200", "cluster.ext_proc_0.upstream_rq_total"} {
						if got, want := stats[name], uint64(len(ids)); got != want {
							t.Errorf("%s = %d, want %d", name, got, want)
						}
					}
				})
			}
		}
	}
}

func await(t *testing.T, e *envoy.Envoy, match func(envoy.Entry) bool) (envoy.Entry, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	return e.Await(ctx, match)
}

// TestChain puts two filters in a row: the second sees what the first did, and either
// can answer.
func TestChain(t *testing.T) {
	second := pick(t, func(header map[string]string) *extprocpb.ProcessingResponse {
		if header["x-first"] == "" {
			return goOn()
		}
		return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocpb.ImmediateResponse{
			Status:  &typepb.HttpStatus{Code: typepb.StatusCode_TooManyRequests},
			Details: "evicted by test",
			Body:    []byte("busy"),
		}}}
	})
	first := pick(t, func(header map[string]string) *extprocpb.ProcessingResponse { return goOn("x-first", "here") })
	e := start(t, envoy.Config{
		ExtProc:  []envoy.ExtProc{{Address: first}, {Address: second}},
		Upstream: envoy.Upstream{Endpoints: []string{"127.0.0.1:1"}},
	})
	if got, err := get(t, e.URL()+"/"); err != nil || got != "busy" {
		t.Errorf("got %q, %v, want %q", got, err, "busy")
	}
	want := envoy.Entry{Protocol: "HTTP/1.1", Method: "GET", Path: "/", Code: 429, Details: "evicted_by_test", Flags: "-", BytesSent: 4}
	got, err := await(t, e, func(envoy.Entry) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(envoy.Entry{}, "Duration")); diff != "" {
		t.Errorf("entry (-want +got):\n%s", diff)
	}
}

// TestAwait waits for an entry that is not there yet, for one that never comes, and
// from several goroutines.
func TestAwait(t *testing.T) {
	release := make(chan struct{})
	upstream := serve(t, func(w http.ResponseWriter, r *http.Request) { <-release })
	e := start(t, envoy.Config{Upstream: envoy.Upstream{Endpoints: []string{upstream}}})

	var wg sync.WaitGroup
	defer wg.Wait()
	for i := range 8 {
		path := fmt.Sprintf("/%d", i)
		wg.Go(func() {
			if _, err := get(t, e.URL()+path); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			got, err := await(t, e, func(got envoy.Entry) bool { return got.Path == path })
			if err != nil {
				t.Error(err)
			}
			if got.Duration < 50*time.Millisecond || got.Duration > 5*time.Second {
				t.Errorf("duration %v, want a bit more than 50ms", got.Duration)
			}
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := e.Await(ctx, func(envoy.Entry) bool { return true })
	check(t, err, "no such entry among 0 in the access log: context deadline exceeded")
	close(release)
}
