package envoy_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"

	"github.com/extevict/extevict/internal/envoy"
)

// TestConfig sets everything, each mode and each option in a filter of its own, and
// asks a real Envoy what it made of it.
func TestConfig(t *testing.T) {
	defaults := &filterpb.ExternalProcessor{
		MessageTimeout: durationpb.New(10 * time.Second),
		ProcessingMode: &filterpb.ProcessingMode{
			RequestHeaderMode:   filterpb.ProcessingMode_SEND,
			RequestTrailerMode:  filterpb.ProcessingMode_SKIP,
			ResponseHeaderMode:  filterpb.ProcessingMode_SEND,
			ResponseTrailerMode: filterpb.ProcessingMode_SKIP,
		},
	}
	config := envoy.Config{
		Upstream:     envoy.Upstream{Endpoints: []string{"127.0.0.1:2", "[::1]:3"}, HTTP2: true, MaxConnections: 7},
		DelayedClose: new(time.Duration),
		RetryPolicy:  json.RawMessage("{\n \"retry_on\": \"5xx\"}"),
		LocalReply:   json.RawMessage(`{"body_format": {"text_format": "<%LOCAL_REPLY_BODY%>"}}`),
	}
	var wants []*filterpb.ExternalProcessor
	add := func(p envoy.ExtProc, change func(*filterpb.ExternalProcessor)) {
		want := proto.CloneOf(defaults)
		want.GrpcService = &corepb.GrpcService{TargetSpecifier: &corepb.GrpcService_EnvoyGrpc_{
			EnvoyGrpc: &corepb.GrpcService_EnvoyGrpc{ClusterName: fmt.Sprintf("ext_proc_%d", len(wants))}}}
		change(want)
		wants = append(wants, want)
		p.Address = "127.0.0.1:1"
		config.ExtProc = append(config.ExtProc, p)
	}
	add(envoy.ExtProc{}, func(*filterpb.ExternalProcessor) {})
	add(envoy.ExtProc{MessageTimeout: 1250 * time.Millisecond}, func(w *filterpb.ExternalProcessor) { w.MessageTimeout = durationpb.New(1250 * time.Millisecond) })
	add(envoy.ExtProc{FailureModeAllow: true}, func(w *filterpb.ExternalProcessor) { w.FailureModeAllow = true })
	add(envoy.ExtProc{AllowModeOverride: true}, func(w *filterpb.ExternalProcessor) { w.AllowModeOverride = true })
	add(envoy.ExtProc{DisableImmediateResponse: true}, func(w *filterpb.ExternalProcessor) { w.DisableImmediateResponse = true })
	add(envoy.ExtProc{ObservabilityMode: true}, func(w *filterpb.ExternalProcessor) { w.ObservabilityMode = true })
	add(envoy.ExtProc{ReceivingNamespaces: []string{"a.b", `c"d`}}, func(w *filterpb.ExternalProcessor) {
		w.MetadataOptions = &filterpb.MetadataOptions{ReceivingNamespaces: &filterpb.MetadataOptions_MetadataNamespaces{Untyped: []string{"a.b", `c"d`}}}
	})
	mode := func(m envoy.ProcessingMode, change func(*filterpb.ProcessingMode)) {
		add(envoy.ExtProc{Mode: m}, func(w *filterpb.ExternalProcessor) { change(w.ProcessingMode) })
	}
	for set, want := range map[envoy.HeaderMode]filterpb.ProcessingMode_HeaderSendMode{
		envoy.Default: filterpb.ProcessingMode_DEFAULT,
		envoy.Send:    filterpb.ProcessingMode_SEND,
		envoy.Skip:    filterpb.ProcessingMode_SKIP,
	} {
		mode(envoy.ProcessingMode{RequestHeaders: set}, func(w *filterpb.ProcessingMode) { w.RequestHeaderMode = want })
		mode(envoy.ProcessingMode{RequestTrailers: set}, func(w *filterpb.ProcessingMode) { w.RequestTrailerMode = want })
		mode(envoy.ProcessingMode{ResponseHeaders: set}, func(w *filterpb.ProcessingMode) { w.ResponseHeaderMode = want })
		mode(envoy.ProcessingMode{ResponseTrailers: set}, func(w *filterpb.ProcessingMode) { w.ResponseTrailerMode = want })
	}
	for set, want := range map[envoy.BodyMode]filterpb.ProcessingMode_BodySendMode{
		envoy.None:               filterpb.ProcessingMode_NONE,
		envoy.Streamed:           filterpb.ProcessingMode_STREAMED,
		envoy.Buffered:           filterpb.ProcessingMode_BUFFERED,
		envoy.BufferedPartial:    filterpb.ProcessingMode_BUFFERED_PARTIAL,
		envoy.FullDuplexStreamed: filterpb.ProcessingMode_FULL_DUPLEX_STREAMED,
	} {
		mode(envoy.ProcessingMode{RequestBody: set, RequestTrailers: envoy.Send}, func(w *filterpb.ProcessingMode) {
			w.RequestBodyMode, w.RequestTrailerMode = want, filterpb.ProcessingMode_SEND
		})
		mode(envoy.ProcessingMode{ResponseBody: set, ResponseTrailers: envoy.Send}, func(w *filterpb.ProcessingMode) {
			w.ResponseBodyMode, w.ResponseTrailerMode = want, filterpb.ProcessingMode_SEND
		})
	}

	text, err := get(t, start(t, config).Admin()+"/config_dump")
	if err != nil {
		t.Fatal(err)
	}
	var dump any
	if err := json.Unmarshal([]byte(text), &dump); err != nil {
		t.Fatal(err)
	}
	static := at(dump, "configs", 0, "bootstrap", "static_resources")
	manager := at(static, "listeners", 0, "filter_chains", 0, "filters", 0, "typed_config")

	for i, want := range wants {
		b, err := json.Marshal(at(manager, "http_filters", i, "typed_config"))
		if err != nil {
			t.Fatal(err)
		}
		got := new(filterpb.ExternalProcessor)
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(b, got); err != nil { // "@type" is unknown
			t.Fatalf("%v in %s", err, b)
		}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", config.ExtProc[i], diff)
		}
	}

	for _, c := range []struct {
		name string
		got  any
		want string // JSON
	}{
		{"delayed_close_timeout", at(manager, "delayed_close_timeout"), `"0s"`},
		{"local_reply_config", at(manager, "local_reply_config"), string(config.LocalReply)},
		{"route", at(manager, "route_config", "virtual_hosts", 0, "routes", 0, "route"),
			`{"cluster": "upstream", "timeout": "0s", "retry_policy": {"retry_on": "5xx"}}`},
		{"endpoints", at(static, "clusters", 0, "load_assignment", "endpoints", 0, "lb_endpoints"),
			`[{"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 2}}}},
			  {"endpoint": {"address": {"socket_address": {"address": "::1", "port_value": 3}}}}]`},
		{"circuit_breakers", at(static, "clusters", 0, "circuit_breakers", "thresholds", 0),
			`{"max_connections": 7, "max_pending_requests": 1000000, "max_requests": 1000000}`},
	} {
		var want any
		if err := json.Unmarshal([]byte(c.want), &want); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, c.got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

// at returns what decoded JSON has at path: keys of objects and indices of arrays. It
// is nil where there is nothing.
func at(v any, path ...any) any {
	for _, p := range path {
		switch p := p.(type) {
		case string:
			o, _ := v.(map[string]any)
			v = o[p]
		case int:
			a, _ := v.([]any)
			if p >= len(a) {
				return nil
			}
			v = a[p]
		}
	}
	return v
}

// TestConcurrency counts Envoy's workers.
func TestConcurrency(t *testing.T) {
	for set, want := range map[int]uint64{0: 1, 2: 2} {
		c := unreachable
		c.Concurrency = set
		stats, err := start(t, c).Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := stats["server.concurrency"]; got != want {
			t.Errorf("Concurrency %d: %d workers, want %d", set, got, want)
		}
	}
}
